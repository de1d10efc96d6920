// SPDX-License-Identifier: MIT
// MoE GEMM + combine: where rows belong, worked out on the device from the counts of all ranks.
#pragma once

#include "kernels/ops/moe_gemm_combine/cuda_params.h"
#include "kernels/ops/moe_gemm_combine/push_units.h"
#include "kernels/ops/moe_routing/cuda_routing.cuh"

namespace mk::moe_gemm_combine {

struct RowsAndBlocks {
  uint32_t rows;
  uint32_t blocks;
};

// One warp: visit(expert, row, block) with the rows and blocks of the experts before each, of which
// rows_of(expert) says how many there are; those of all.
template <class RowsOf, class Visit>
__device__ __forceinline__ RowsAndBlocks scan_experts(int num_experts, RowsOf&& rows_of, Visit&& visit) {
  const int lane = threadIdx.x % 32;
  uint32_t rows_before = 0, blocks_before = 0;
#pragma unroll 1
  for (int begin = 0; begin < num_experts; begin += 32) {
    const int expert = begin + lane;
    const uint32_t rows = expert < num_experts ? rows_of(expert) : 0;
    const uint32_t blocks = moe::num_row_blocks(rows);
    uint32_t row_sum = rows, block_sum = blocks;
    for (int distance = 1; distance < 32; distance *= 2) {
      const uint32_t more_rows = __shfl_up_sync(~0u, row_sum, distance);
      const uint32_t more_blocks = __shfl_up_sync(~0u, block_sum, distance);
      if (lane >= distance) {
        row_sum += more_rows;
        block_sum += more_blocks;
      }
    }
    if (expert < num_experts) visit(expert, rows_before + row_sum - rows, blocks_before + block_sum - blocks);
    rows_before += __shfl_sync(~0u, row_sum, 31);
    blocks_before += __shfl_sync(~0u, block_sum, 31);
  }
  return {rows_before, blocks_before};
}

// One warp: the rows and blocks that `home` gets from each expert, summed, for this rank's experts and, at
// home, for all.
__device__ inline void scan_home(const CudaParams& params, const moe::Counts& counts, Tables& tables,
                                 int home) {
  const moe::CudaRouting& routing = params.routing;
  const int first = routing.first_expert(routing.rank);
  const int end = routing.first_expert(routing.rank + 1);
  const RowsAndBlocks all = scan_experts(
      routing.experts, [&](int expert) { return counts.expert_rows(home, expert); },
      [&](int expert, uint32_t row, uint32_t block) {
        if (home == routing.rank) {
          tables.home_rows[expert] = row;
          tables.home_blocks[expert] = block;
        }
        if (expert >= first && expert < end) {
          tables.peer_rows[(expert - first) * routing.nranks + home] = row;
          tables.peer_blocks[(expert - first) * routing.nranks + home] = block;
        }
      });
  if (threadIdx.x % 32 != 0) return;
  tables.collector[home] = static_cast<uint8_t>(home);
  if (home == routing.rank) {
    tables.home_rows[routing.experts] = all.rows;
    tables.home_blocks[routing.experts] = all.blocks;
  }
}

// By all threads of a CTA: what this rank computes, summed over its experts.
template <int NUM_THREADS>
__device__ __forceinline__ void fill_experts(const CudaParams& params, const moe::Counts& counts,
                                             Tables& tables) {
  const int num_experts = params.routing.num_experts(params.routing.rank);
  for (int local = threadIdx.x; local < num_experts; local += NUM_THREADS)
    count_expert(params.routing, counts, params.unit_rows, local, tables);
  __syncthreads();
  uint32_t* const sums[] = {tables.rows, tables.blocks, tables.rounds};
  for (int i = threadIdx.x / 32; i < 3; i += NUM_THREADS / 32) moe::exclusive_scan(sums[i], num_experts);
}

// By all threads of a CTA.
template <int NUM_THREADS>
__device__ void fill_tables(const RankLaunch& launch, const CudaParams& params, Tables& tables) {
  const moe::CudaRouting& routing = params.routing;
  const moe::Counts counts(routing, launch.area(routing.rank, 0));
  if (threadIdx.x == 0) {
    fill_homes(
        routing, 0, tables, [](int) { return false; }, [&](int home) { return home == routing.rank; });
  }
  fill_experts<NUM_THREADS>(params, counts, tables);
  for (int home = threadIdx.x / 32; home < routing.nranks; home += NUM_THREADS / 32)
    scan_home(params, counts, tables, home);
  __syncthreads();
  for (int local = threadIdx.x; local < routing.num_experts(routing.rank); local += NUM_THREADS)
    keep_rows(routing, counts, local, routing.rank, tables);
  __syncthreads();
}

}  // namespace mk::moe_gemm_combine
