// SPDX-License-Identifier: MIT
// Random packed sequences, as kernels see them with the table that they write, and in schedule.h's words.
#pragma once

#include <algorithm>
#include <random>
#include <vector>

#include "kernels/cuda/ring_attention_plan.h"
#include "kernels/ops/ring_attention/packed_blocks.h"
#include "kernels/ops/ring_attention/schedule.h"

namespace mk::test {

// The table of rows, written in the plainest way.
inline std::vector<int32_t> row_begins_of(const ring_attention::PackedSlices& slices) {
  std::vector<int32_t> begins;
  for (int rank = 0; rank < slices.nranks; ++rank) {
    for (int sequence = 0, rows = 0; sequence <= slices.num_sequences; ++sequence) {
      begins.push_back(slices.zigzag ? rows : slices.slice_rows_before(rank, slices.cu_seqlens[sequence]));
      if (slices.zigzag && sequence < slices.num_sequences) rows += slices.share_rows(rank, sequence);
    }
  }
  return begins;
}

struct PackedCut {
  std::mt19937_64& random;
  RingAttentionCall call;
  std::vector<int32_t> cu_seqlens, row_begins;
  ring_attention::PackedSlices slices;
  ring_attention::Slices expected;
  std::vector<std::vector<int64_t>> positions;  // [rank][row]

  explicit PackedCut(std::mt19937_64& bits, int most_seq = 250) : random(bits) {
    const int nranks = 1 + below(5);
    call.op = MK_OPERATOR_RING_ATTENTION;
    call.batch = call.heads = call.kv_heads = 1;
    call.dim = 64;
    call.seq = below(4) == 0 ? below(12) : below(most_seq);
    call.causal = static_cast<mk_causal_t>(below(3));
    call.num_sequences = 1 + (below(3) == 0 ? below(60) : below(6));
    cu_seqlens = {0, static_cast<int32_t>(call.seq)};
    for (int i = 1; i < call.num_sequences; ++i) {
      // Also sequences of one position next to each other.
      cu_seqlens.push_back(below(2) == 0 ? std::min(i, static_cast<int>(call.seq))
                                         : below(static_cast<int>(call.seq) + 1));
    }
    std::sort(cu_seqlens.begin(), cu_seqlens.end());
    call.cu_seqlens = cu_seqlens.data();
    slices = ring_attention::packed_slices(call, nranks, call.causal == MK_CAUSAL_ZIGZAG);
    row_begins = row_begins_of(slices);
    slices.row_begins = row_begins.data();
    expected = {call.seq, nranks, slices.causal, slices.zigzag, call.num_sequences, cu_seqlens.data()};
    for (int rank = 0; rank < nranks; ++rank) {
      positions.emplace_back();
      for (int64_t row = 0; row < expected.rows(rank); ++row)
        positions.back().push_back(expected.position(rank, row));
    }
  }

  int below(int bound) const { return static_cast<int>(random() % static_cast<uint64_t>(bound)); }
  // Some of a rank's rows, perhaps none.
  ring_attention::RowRange range_of(int rank) const {
    const int rows = slices.rows(rank), begin = below(rows + 1);
    return {begin, begin + below(rows - begin + 1)};
  }
  bool sees(int rank, int query, int source, int key) const {
    const int64_t at = positions[static_cast<size_t>(rank)][static_cast<size_t>(query)];
    const int64_t other = positions[static_cast<size_t>(source)][static_cast<size_t>(key)];
    return other >= expected.visible_begin(at) && other < expected.visible_end(at);
  }
  bool sees_some(int rank, const ring_attention::RowRange& queries, int source,
                 const ring_attention::RowRange& keys) const {
    for (int query = queries.begin; query < std::min(queries.end, slices.rows(rank)); ++query) {
      for (int key = keys.begin; key < std::min(keys.end, slices.rows(source)); ++key) {
        if (sees(rank, query, source, key)) return true;
      }
    }
    return false;
  }
  // All keys, and all of them there.
  bool sees_all(int rank, const ring_attention::RowRange& queries, int source,
                const ring_attention::RowRange& keys) const {
    if (keys.end > slices.rows(source)) return false;
    for (int query = queries.begin; query < queries.end; ++query) {
      for (int key = keys.begin; key < keys.end; ++key) {
        if (!sees(rank, query, source, key)) return false;
      }
    }
    return true;
  }
};

}  // namespace mk::test
