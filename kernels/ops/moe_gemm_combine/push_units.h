// SPDX-License-Identifier: MIT
// Which of the rows that a rank computes its push warps on GPUs take, and where they go. Host and device.
#pragma once

#include "kernels/ops/moe_gemm_combine/cuda_layout.h"

namespace mk::moe_gemm_combine {

using moe::RowSegment;

// In shared memory, the same in every CTA of a rank. Sums are over what comes before.
struct Tables {
  // By local expert, the last at [local experts].
  uint32_t rows[moe::CUDA_MAX_EXPERTS + 1];    // that the expert computes
  uint32_t blocks[moe::CUDA_MAX_EXPERTS + 1];  // of these rows
  uint32_t rounds[moe::CUDA_MAX_EXPERTS + 1];  // in which they are pushed, a unit for each home
  uint8_t homes[MAX_GPU_RANKS];                // whose rows are pushed, in turn, num_far in other nodes first
  uint8_t num_homes;
  uint8_t num_far;
  uint16_t num_split;  // experts whose rows for homes in other nodes go first, and those for others last
  // By expert: rows of this rank's tokens that come home from it. Of several nodes those of its node alone are
  // counted, and the last is that of all rows that come here.
  uint32_t home_rows[moe::CUDA_MAX_EXPERTS + 1];
  uint32_t home_blocks[moe::CUDA_MAX_EXPERTS + 1];
  // By local expert and home: where the home's rows of the expert go, and their blocks, at the home's collector
  // in this node: in one node, the home itself. Of homes that this rank collects for: where they stay, behind
  // all that come here.
  uint32_t peer_rows[moe::CUDA_MAX_EXPERTS + MAX_GPU_RANKS];
  uint32_t peer_blocks[moe::CUDA_MAX_EXPERTS + MAX_GPU_RANKS];
  uint8_t collector[MAX_GPU_RANKS];
};

// The next ranks' turns come first. is_far(home): is it in another node? stays(home): does this rank collect
// its rows?
template <class IsFar, class Stays>
MK_HOST_DEVICE void fill_homes(const moe::CudaRouting& routing, int num_split, Tables& tables, IsFar&& is_far,
                               Stays&& stays) {
  const int num_experts = routing.num_experts(routing.rank);
  tables.num_split = static_cast<uint16_t>(num_split < num_experts ? num_split : num_experts);
  int count = 0;
  for (int pass = 0; pass < 2; ++pass) {
    for (int step = 1; step <= routing.nranks; ++step) {
      const int home = (routing.rank + step) % routing.nranks;
      if (is_far(home) == (pass == 0) && !stays(home)) tables.homes[count++] = static_cast<uint8_t>(home);
    }
    if (pass == 0) tables.num_far = static_cast<uint8_t>(count);
  }
  tables.num_homes = static_cast<uint8_t>(count);
}

// A local expert's numbers, yet to be summed.
MK_HOST_DEVICE void count_expert(const moe::CudaRouting& routing, const moe::Counts& counts, uint32_t unit_rows,
                                 int local_expert, Tables& tables) {
  const int expert = routing.first_expert(routing.rank) + local_expert;
  uint32_t rows = 0, most_units = 0;
  for (int home = 0; home < routing.nranks; ++home) {
    const uint32_t count = counts.expert_rows(home, expert);
    const uint32_t units = RowSegment{0, count}.num_units(unit_rows);
    most_units = units > most_units ? units : most_units;
    rows += count;
  }
  tables.rows[local_expert] = rows;
  tables.blocks[local_expert] = moe::num_row_blocks(rows);
  tables.rounds[local_expert] = most_units;
}

// A home's rows among those of a local expert: a list of the home's, behind `begin` rows of homes before it.
struct HomeRows {
  uint32_t begin;
  RowSegment segment;
};
MK_HOST_DEVICE HomeRows home_rows(const moe::Counts& counts, int expert, int home) {
  uint32_t begin = 0;
  for (int before = 0; before < home; ++before) begin += counts.expert_rows(before, expert);
  return {begin, {0, counts.expert_rows(home, expert)}};
}

// Of a home that this rank collects for, once `rows`, `blocks` and the last of `home_rows` are summed.
MK_HOST_DEVICE void keep_rows(const moe::CudaRouting& routing, const moe::Counts& counts, int local_expert,
                              int home, Tables& tables) {
  const int at = local_expert * routing.nranks + home;
  tables.peer_rows[at] = tables.home_rows[routing.experts] + tables.rows[local_expert] +
                         home_rows(counts, routing.first_expert(routing.rank) + local_expert, home).begin;
}

// A row that is summed: its number, behind the counts, and the flag that tells of it, which is that of a block.
struct AwaitedRow {
  uint32_t row;
  int flag;
  uint32_t block;
};
// The `slot`-th of a home's rows of a local expert that stay here.
MK_HOST_DEVICE AwaitedRow kept_row(const moe::CudaRouting& routing, const Tables& tables, int expert, int home,
                                   uint32_t slot) {
  const int local = expert - routing.first_expert(routing.rank);
  const uint32_t row = tables.peer_rows[local * routing.nranks + home] + slot;
  const uint32_t of_expert = row - tables.home_rows[routing.experts] - tables.rows[local];
  const uint32_t block = tables.blocks[local] + of_expert / moe::BLOCK_ROWS;
  return {row, static_cast<int>(HALF_FLAGS + block), block};
}

// Rows of one expert for one home, and how far a warp has come with them.
struct PushUnit {
  int rank;              // that collects them
  uint32_t num_bytes;    // 0: nothing
  uint32_t first_block;  // of this rank's, that it waits for
  uint32_t num_blocks;
  int64_t from;
  int64_t to;
  uint64_t note;
};

// A unit that has arrived: the rank, units of its block, the block there; and where they are counted.
MK_HOST_DEVICE uint64_t note_of(int rank, uint32_t num_units, uint32_t block, uint32_t count) {
  return static_cast<uint64_t>(rank) << 56 | static_cast<uint64_t>(num_units) << 48 |
         static_cast<uint64_t>(block) << 24 | count;
}

// A turn: the round of all that it belongs to, and which of the homes it is for.
struct PushTurn {
  uint32_t round;
  int home;
};
MK_HOST_DEVICE uint32_t num_turns(const moe::CudaRouting& routing, const Tables& tables) {
  return tables.rounds[routing.num_experts(routing.rank)] * tables.num_homes;
}
// In the order in which rows are computed: of split experts those for other nodes, then of the others all, then
// of split experts the rest.
MK_HOST_DEVICE PushTurn turn_of(const moe::CudaRouting& routing, const Tables& tables, uint32_t index) {
  const uint32_t num_far = tables.num_far, num_homes = tables.num_homes;
  const uint32_t split = tables.rounds[tables.num_split];
  const uint32_t unsplit = tables.rounds[routing.num_experts(routing.rank)] - split;
  if (index < split * num_far) return {index / num_far, tables.homes[index % num_far]};
  index -= split * num_far;
  if (index < unsplit * num_homes) return {split + index / num_homes, tables.homes[index % num_homes]};
  index -= unsplit * num_homes;
  const uint32_t num_near = num_homes - num_far;
  return {index / num_near, tables.homes[num_far + index % num_near]};
}

// The `index`-th turn's.
MK_HOST_DEVICE PushUnit unit_of(const moe::CudaRouting& routing, const CudaLayout& layout, uint32_t unit_rows,
                                const Tables& tables, const moe::Counts& counts, uint32_t index) {
  const PushTurn turn = turn_of(routing, tables, index);
  const int home = turn.home;
  const int local = moe::find_interval(tables.rounds, routing.num_experts(routing.rank), turn.round);
  const uint32_t round = turn.round - tables.rounds[local];
  const HomeRows rows = home_rows(counts, routing.first_expert(routing.rank) + local, home);
  if (round >= rows.segment.num_units(unit_rows)) return {};
  const uint32_t begin = rows.segment.unit_begin(round, unit_rows);
  const uint32_t end = rows.segment.unit_end(round, unit_rows);
  const uint32_t block = begin / moe::BLOCK_ROWS;
  const uint32_t row = rows.begin + begin;  // of the expert's
  const int at = local * routing.nranks + home;
  // Blocks of neighbouring segments are counted apart: a segment's first number is beyond the last one's last.
  const uint32_t count = (tables.rows[local] + rows.begin) / moe::BLOCK_ROWS + block + at;
  const uint32_t first_block = row / moe::BLOCK_ROWS;
  const int collector = tables.collector[home];
  return {collector,
          (end - begin) * static_cast<uint32_t>(layout.row_bytes),
          tables.blocks[local] + first_block,
          (rows.begin + end - 1) / moe::BLOCK_ROWS - first_block + 1,
          layout.product_row(tables.home_rows[routing.experts], int64_t{tables.rows[local]} + row),
          layout.home_row(int64_t{tables.peer_rows[at]} + begin),
          note_of(collector, rows.segment.in_block(block).num_units(unit_rows), tables.peer_blocks[at] + block,
                  count)};
}

}  // namespace mk::moe_gemm_combine
