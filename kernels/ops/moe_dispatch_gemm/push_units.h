// SPDX-License-Identifier: MIT
// Which rows a rank's push warps on GPUs take, and where they go. Host and device.
#pragma once

#include "kernels/ops/moe_routing/cuda_params.h"
#include "kernels/ops/moe_routing/row_segments.h"

namespace mk::moe_dispatch_gemm {

using moe::RowSegment;

// In shared memory, the same in every CTA of a rank: by expert, sums over the experts before it (of all ranks,
// modulo 2^32), and at [experts] over all.
struct Tables {
  uint32_t rows[moe::CUDA_MAX_EXPERTS + 1];      // that the expert gets
  uint32_t blocks[moe::CUDA_MAX_EXPERTS + 1];    // of these rows
  uint32_t own_rows[moe::CUDA_MAX_EXPERTS + 1];  // of this rank's tokens
  uint32_t units[moe::CUDA_MAX_EXPERTS + 1];     // in which they travel
  uint32_t lower_rows[moe::CUDA_MAX_EXPERTS];    // no sum: the expert's rows from ranks below this one

  // This rank's rows among those of an expert.
  MK_HOST_DEVICE RowSegment segment(int expert) const {
    return {lower_rows[expert], own_rows[expert + 1] - own_rows[expert]};
  }
};

// An expert's numbers, yet to be summed.
MK_HOST_DEVICE void count_expert(const moe::CudaRouting& routing, const moe::Counts& counts, uint32_t unit_rows,
                                 int expert, Tables& tables) {
  uint32_t rows = 0, lower = 0;
  for (int source = 0; source < routing.nranks; ++source) {
    if (source == routing.rank) lower = rows;
    rows += counts.expert_rows(source, expert);
  }
  const RowSegment own{lower, counts.expert_rows(routing.rank, expert)};
  tables.rows[expert] = rows;
  tables.blocks[expert] = moe::num_row_blocks(rows);
  tables.own_rows[expert] = own.count;
  tables.units[expert] = own.num_units(unit_rows);
  tables.lower_rows[expert] = lower;
}

// Rows of one expert that a warp pushes, and how far it has come.
struct PushUnit {
  int rank;           // the expert's
  uint32_t row;       // there, the next one's
  uint32_t position;  // in this rank's order
  uint32_t num_rows;  // that are left
  uint64_t note;
};

// A unit that has arrived: rank, units of its block, block.
MK_HOST_DEVICE uint64_t note_of(int rank, uint32_t block, uint32_t num_units) {
  return static_cast<uint64_t>(rank) << 48 | static_cast<uint64_t>(num_units) << 32 | block;
}

// Whose units there are.
MK_HOST_DEVICE void fill_turns(const moe::CudaRouting& routing, const Tables& tables, moe::Turns& turns) {
  turns.clear();
  for (int step = 0; step < routing.nranks; ++step) {
    const int rank = (routing.rank + step) % routing.nranks;
    const uint32_t units =
        tables.units[routing.first_expert(rank + 1)] - tables.units[routing.first_expert(rank)];
    turns.add(rank, units);
  }
}

MK_HOST_DEVICE PushUnit unit_of(const moe::CudaRouting& routing, uint32_t unit_rows, const Tables& tables,
                                int rank, uint32_t index) {
  const int first = routing.first_expert(rank);
  const int expert = first + moe::find_interval(tables.units + first, routing.num_experts(rank), index);
  const RowSegment segment = tables.segment(expert);
  const uint32_t unit = index - (tables.units[expert] - tables.units[first]);
  const uint32_t begin = segment.unit_begin(unit, unit_rows);
  const uint32_t block = begin / moe::BLOCK_ROWS;
  return {rank, tables.rows[expert] - tables.rows[first] + begin,
          tables.own_rows[expert] + begin - segment.begin, segment.unit_end(unit, unit_rows) - begin,
          note_of(rank, tables.blocks[expert] - tables.blocks[first] + block,
                  segment.in_block(block).num_units(unit_rows))};
}

}  // namespace mk::moe_dispatch_gemm
