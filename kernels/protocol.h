// SPDX-License-Identifier: MIT
// What every operator's protocol is made of: who owns which rows, who relays for whom, epochs and banks, the
// entry record, the control block. Pure functions and layouts; host and device. docs/protocol.md tells the
// story.
#pragma once

#include <cstddef>
#include <cstdint>

#include "device/host_device.h"

namespace mk {

// The topology as both executors see it: arrays in memory of the executor.
struct TopologyView {
  int rank;
  int nranks;
  int num_nodes;
  const int* node_of_rank;        // [nranks]
  const int* local_rank_of_rank;  // [nranks]
  const int* node_begin;          // [num_nodes + 1], into ranks_by_node
  const int* ranks_by_node;       // [nranks], ranks of node 0, then of node 1, ...

  MK_HOST_DEVICE int node() const { return node_of_rank[rank]; }
  MK_HOST_DEVICE int local_rank() const { return local_rank_of_rank[rank]; }
  MK_HOST_DEVICE int local_nranks() const { return node_nranks(node()); }
  MK_HOST_DEVICE int node_nranks(int node) const { return node_begin[node + 1] - node_begin[node]; }
  MK_HOST_DEVICE int rank_at(int node, int local_rank) const {
    return ranks_by_node[node_begin[node] + local_rank];
  }
  MK_HOST_DEVICE bool is_local(int other) const { return node_of_rank[other] == node(); }

  // The rank of `node` that speaks for that node with `rank` of another node: the one on the same rail, or, in
  // a smaller node, the one that the rail folds onto.
  MK_HOST_DEVICE int rail_peer(int other, int node) const {
    return rank_at(node, local_rank_of_rank[other] % node_nranks(node));
  }
  // Ranks in rotated order, nearest first: this rank, the others of its node from the next local rank on, then
  // the next nodes in turn, each from the same rail on. Position 0 .. nranks-1. Spreads the load of one moment
  // over all links.
  MK_HOST_DEVICE int rotated(int position) const {
    int node_index = node();
    for (int step = 0; step < num_nodes; ++step) {
      const int count = node_nranks(node_index);
      if (position < count) return rank_at(node_index, (local_rank() + position) % count);
      position -= count;
      node_index = node_index + 1 == num_nodes ? 0 : node_index + 1;
    }
    return -1;
  }
};

MK_HOST_DEVICE constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
MK_HOST_DEVICE constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }
MK_HOST_DEVICE constexpr int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }

// Rank r of `nranks` owns rows [r * ceil(m / nranks), ...).
MK_HOST_DEVICE constexpr int64_t rows_begin(int64_t m, int nranks, int rank) {
  return min_of(m, ceil_div(m, nranks) * rank);
}
MK_HOST_DEVICE constexpr int64_t rows_count(int64_t m, int nranks, int rank) {
  return rows_begin(m, nranks, rank + 1) - rows_begin(m, nranks, rank);
}

// Chunks: the rows of a rank cut into units of transfer, each with a flag of its own.
MK_HOST_DEVICE constexpr int num_chunks(int64_t rows, int64_t chunk_rows) {
  return static_cast<int>(ceil_div(rows, chunk_rows));
}

// Epochs count launches from 1; the parity of the epoch selects the bank of receive areas, flags and signals.
MK_HOST_DEVICE constexpr int bank_of(uint64_t epoch) { return static_cast<int>(epoch & 1); }

// What a rank says of a launch when it enters it. Everything but the epoch and the output fields must be equal
// on all ranks; a difference is MK_ERROR_MISMATCH.
struct alignas(16) EntryRecord {
  uint64_t epoch;   // last to be written, with release order; a reader that sees it sees the rest
  uint32_t op;      // mk_operator_t
  uint32_t dtypes;  // dtype | out_dtype << 8 | comm_dtype << 16 | mode << 24
  int64_t shape[4];
  uint64_t tuning_hash;
  uint64_t output_offset;  // of an output in symmetric memory that peers may write to, or kNoOutput
  int64_t output_ld;
  uint64_t modes[3];  // what else an operator has globally equal
};
inline constexpr uint64_t kNoOutput = ~0ull;

// A caller's output that peers may write to directly, if it lies in symmetric memory.
struct PeerOutput {
  const void* data = nullptr;
  size_t bytes = 0;
  int64_t ld = 0;
};

static_assert(sizeof(EntryRecord) == 96 && offsetof(EntryRecord, shape) == 16);

// Flags: one 64-bit word a transfer unit, written by exactly one rank, which stores the epoch of the launch
// (release) after the data. Compared with >=, never reset.
inline constexpr int kFlagsPerBank = 1 << 18;
// The first signals of each bank announce entries, one a source rank.
inline constexpr int kEntrySignals = 4096;

// A rank's control block, at offset 0 of its symmetric memory: the doorbell, then entries, inbox and outbox of
// entry records, then flags. One struct gives both size and places.
struct ControlLayout {
  int nranks;

  static constexpr size_t kDoorbell = 0;   // uint32_t, bumped after every flag or entry written here
  static constexpr size_t kSleepers = 64;  // uint32_t, threads asleep on the doorbell
  static constexpr size_t kEntries = 128;
  MK_HOST_DEVICE size_t entry(int bank, int source) const {
    return kEntries + (static_cast<size_t>(bank) * nranks + source) * sizeof(EntryRecord);
  }
  MK_HOST_DEVICE size_t inbox(int bank, int source) const { return entry(2 + bank, source); }
  MK_HOST_DEVICE size_t outbox(int bank) const { return entry(4, bank); }
  MK_HOST_DEVICE size_t flag(int bank, int index) const {
    return round_up(static_cast<int64_t>(entry(4, 2)), 128) +
           (static_cast<size_t>(bank) * kFlagsPerBank + index) * sizeof(uint64_t);
  }
  MK_HOST_DEVICE size_t bytes() const { return flag(2, 0); }
};

}  // namespace mk
