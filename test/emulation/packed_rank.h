// SPDX-License-Identifier: MIT
// One rank of ring attention over packed sequences on an emulated GPU: its keys and values, what a call says,
// and whether blocks that have come are right. How CTAs part into roles, and what they wait for, says who
// derives from it.
#pragma once

#include "shim/device_words.h"

#include <cstring>
#include <thread>
#include <vector>

#include "../unit/packed_cut.h"
#include "emulated_gpu.h"
#include "kernels/ops/ring_attention/cuda_packed.cuh"

namespace mk::test {

using namespace ring_attention;

struct Config {
  static constexpr int HEAD_DIM = 128;
  static constexpr int NUM_THREADS = 128;
  static constexpr int BLOCK_M = 16;
  static constexpr int BLOCK_N = 32;
  static constexpr int NUM_COLUMN_BLOCKS = 2;
  static constexpr int KEY_COLUMN_BYTES = BLOCK_N * 128;
  static constexpr int KEY_BYTES = NUM_COLUMN_BLOCKS * KEY_COLUMN_BYTES;
};
constexpr int kKvHeads = 2;
constexpr size_t kBankBytes = 8 << 20;

struct Shape {
  mk_causal_t causal;
  bool heads_first;
  std::vector<int32_t> cu_seqlens;
};

inline uint16_t element(uint64_t epoch, bool value, int head, int position, int column) {
  return static_cast<uint16_t>(epoch * 40503 + (value ? 9973u : 0u) + static_cast<unsigned>(head) * 1709u +
                               static_cast<unsigned>(position) * 331u + static_cast<unsigned>(column) * 7u);
}

template <class Params, int NUM_CTAS, class RankConfig = Config>
class PackedRankOf {
 public:
  static constexpr int kDim = RankConfig::HEAD_DIM;

  explicit PackedRankOf(Rank& rank) : rank_(rank), gpu_(rank) {}

  Status set_up(size_t bank_bytes = kBankBytes, int64_t wait_timeout_ms = kPatienceMs) {
    return gpu_.set_up(NUM_CTAS, bank_bytes, wait_timeout_ms);
  }
  EmulatedGpu& gpu() { return gpu_; }

  // Of entries that are right.
  void fill(uint64_t epoch) {
    slices_ = arguments_.params.tiles.slices;
    row_begins_ = row_begins_of(slices_);
    slices_.row_begins = row_begins_.data();
    const int rows = slices_.rows(rank_.rank);
    const int64_t map_rows = arguments_.rows_are_known ? rows : 1;
    for (const bool value : {false, true}) {
      std::vector<uint16_t>& tensor = value ? values_ : keys_;
      tensor.assign(static_cast<size_t>(kKvHeads * rows * kDim + 1), 0xdead);
      for (int head = 0; head < kKvHeads; ++head) {
        for (int row = 0; row < rows; ++row) {
          const int position = packed_row(slices_, rank_.rank, row).position;
          const int at = shape_.heads_first ? head * rows + row : row * kKvHeads + head;
          for (int column = 0; column < kDim; ++column)
            tensor[static_cast<size_t>(at * kDim + column)] = element(epoch, value, head, position, column);
        }
      }
      const ptx::EmulatedTensor map = {tensor.data(),
                                       {kDim, map_rows, kKvHeads, 1},
                                       {shape_.heads_first ? kDim * 2 : kKvHeads * kDim * 2,
                                        shape_.heads_first ? map_rows * kDim * 2 : kDim * 2, 0},
                                       RankConfig::BLOCK_N};
      std::memcpy(&arguments_.maps[value ? PACKED_V : PACKED_K], &map, sizeof map);
    }
  }

  // After all ranks' launches: what each CTA has found out, and the table.
  std::string verify_rows() const {
    for (const int rows : num_rows_) {
      if (rows != slices_.rows(rank_.rank)) return "a wrong number of rows; ";
    }
    // One rank alone has none.
    if (rank_.nranks > 1 && std::memcmp(arguments_.params.comm.staging + arguments_.table_offset,
                                        row_begins_.data(), row_begins_.size() * 4) != 0)
      return "a wrong table; ";
    return "";
  }
  bool is_untouched(uint64_t epoch) const {
    for (int flag = 0; flag < arguments_.params.panels.num_flags(); ++flag) {
      if (*word(flag, epoch) == epoch) return false;
    }
    return true;
  }
  bool is_clean(uint64_t epoch) const { return gpu_.epoch() == epoch && gpu_.is_idle() && gpu_.is_clean(); }

 protected:
  // All but the panels. seq: what the call says, whatever the entries.
  void prepare_call(const Shape& shape, int64_t seq, int num_push_ctas) {
    shape_ = shape;
    call_ = RingAttentionCall{};
    call_.op = MK_OPERATOR_RING_ATTENTION;
    call_.batch = 1;
    call_.seq = seq;
    call_.heads = 2 * kKvHeads;
    call_.kv_heads = kKvHeads;
    call_.dim = kDim;
    call_.causal = shape.causal;
    call_.num_sequences = static_cast<int>(shape.cu_seqlens.size()) - 1;
    call_.cu_seqlens = shape_.cu_seqlens.data();
    const bool zigzag = shape.causal == MK_CAUSAL_ZIGZAG;
    arguments_ = PackedArguments<Params>{};
    Params& params = arguments_.params;
    params.comm = gpu_.comm();
    params.comm.entry.op = MK_OPERATOR_RING_ATTENTION;
    params.comm.entry.output_offset = kNoOutput;
    params.comm.entry.shape[1] = seq;
    params.comm.entry.shape[3] = int64_t{kDim} << 32 | call_.num_sequences;
    params.tiles = {packed_slices(call_, rank_.nranks, zigzag), rank_.rank, call_.heads, kKvHeads,
                    RankConfig::BLOCK_M};
    params.num_push_ctas = num_push_ctas;
    params.dim = kDim;
    arguments_.table_offset = row_table_offset(NUM_CTAS);
    arguments_.is_empty = seq == 0;
    arguments_.rows_are_known = !zigzag;
    arguments_.heads_first = shape.heads_first;
  }
  KeyPanels panels_in_node(int panel_blocks) const {
    return packed_panels(call_, rank_.nranks, shape_.causal == MK_CAUSAL_ZIGZAG, kDim, RankConfig::BLOCK_N,
                         panel_blocks, 1);
  }

  const uint64_t* word(int index, uint64_t epoch) const {
    return reinterpret_cast<const uint64_t*>(gpu_.comm().memory[rank_.rank] +
                                             ControlLayout{rank_.nranks}.flag(bank_of(epoch), index));
  }
  bool wait(int index, uint64_t epoch) const {
    const Deadline deadline = Deadline::after(rank_.timeout);
    while (__atomic_load_n(word(index, epoch), __ATOMIC_ACQUIRE) < epoch) {
      if (deadline.passed() || rank_.abort.raised()) return false;
      std::this_thread::yield();
    }
    return true;
  }
  // A block of `source` in this rank's receive area. Rows behind the last are zeros.
  bool is_right(int source, int block, int head, size_t offset, uint64_t epoch) const {
    const std::byte* const image = gpu_.area(epoch, offset);
    for (const bool value : {false, true}) {
      const auto* at = reinterpret_cast<const uint16_t*>(image + (value ? RankConfig::KEY_BYTES : 0));
      for (int columns = 0; columns < kDim; columns += 64) {
        for (int i = 0; i < RankConfig::BLOCK_N; ++i) {
          const int row = block * RankConfig::BLOCK_N + i;
          const bool is_row = row < slices_.rows(source);
          const int position = is_row ? packed_row(slices_, source, row).position : 0;
          for (int column = columns; column < columns + 64; ++column, ++at) {
            if (*at != (is_row ? element(epoch, value, head, position, column) : 0)) return false;
          }
        }
      }
    }
    return true;
  }

  Rank& rank_;
  EmulatedGpu gpu_;
  Shape shape_;
  RingAttentionCall call_;
  PackedArguments<Params> arguments_;
  std::vector<int32_t> row_begins_;
  PackedSlices slices_;
  std::vector<uint16_t> keys_, values_;
  int num_rows_[NUM_CTAS] = {};  // as the CTAs have it
};

inline std::vector<int32_t> every(int length, int count) {
  std::vector<int32_t> bounds;
  for (int i = 0; i <= count; ++i) bounds.push_back(i * length);
  return bounds;
}

// Sequences within a rank and over several, of one position, empty; one; more of them than threads.
inline std::vector<std::vector<int32_t>> bounds_of_shapes() {
  return {
      {0, 500},     {0, 0, 3, 4, 120, 121, 333, 500, 500}, every(1, 200), every(3, 300), every(64, 6), {0, 1},
      {0, 0, 0, 2}, {0, 300, 301, 302, 303, 304, 305, 600}};
}

// cu_seqlens that are wrong for 400 positions, and what is said of them.
struct BadBounds {
  std::vector<int32_t> bounds;
  std::string says;
};
inline std::vector<BadBounds> bad_bounds() {
  std::vector<int32_t> late = every(1, 400);
  late[390] = 7;
  return {{{1, 300, 400}, "cu_seqlens[0]: expected 0, saw 1"},
          {{0, 500, 400}, "cu_seqlens[2]: expected at least 500"},
          {{0, -1, 400}, "cu_seqlens[1]: expected at least 0"},
          {{0, 300, 399}, "cu_seqlens[2]: expected 400 (seq), saw 399"},
          {late, "cu_seqlens[390]: expected at least 389"}};
}

}  // namespace mk::test
