// SPDX-License-Identifier: MIT
// From a call to what the parameters of all kernels of the GEMM operators have in common.
#pragma once

#include <cuda_runtime.h>

#include "kernels/cuda/rank_gemm_plan.h"
#include "kernels/device/gemm_epilogue_params.h"
#include "kernels/device/load_params.h"
#include "kernels/device/rank_gemm_kernel.h"
#include "kernels/device/rank_gemm_tiles.h"
#include "kernels/device/tile_scheduler.h"
#include "kernels/gemm/gemm_plan.h"
#include "kernels/operator_call.h"

namespace mk {

// The kernel for a plan's tile, which is one of `tiles`.
template <class Params, int NUM_TILES>
const RankGemmKernel<Params>& find_kernel(const RankGemmTable<Params, NUM_TILES>& table,
                                          const GemmTile (&tiles)[NUM_TILES], const GemmPlan& plan,
                                          bool is_transposed) {
  int tile = 0;
  while (tile + 1 < NUM_TILES && (tiles[tile].block_m != plan.block_m || tiles[tile].block_n != plan.block_n)) {
    ++tile;
  }
  return table.entries[tile][is_transposed ? 1 : 0];
}

template <class Params, int NUM_TILES>
const RankGemmKernel<Params>& find_kernel(const RankGemmTable<Params, NUM_TILES>& table,
                                          const GemmSwappedTile (&tiles)[NUM_TILES], const GemmPlan& plan,
                                          bool is_transposed) {
  int tile = 0;
  while (tile + 1 < NUM_TILES && (tiles[tile].block_m != plan.block_m || tiles[tile].block_n != plan.block_n ||
                                  tiles[tile].cluster != plan.cluster)) {
    ++tile;
  }
  return table.entries[tile][is_transposed ? 1 : 0];
}

// May take a while: loads the kernels.
template <class Table>
cudaError_t prepare_table(const Table& table) {
  for (const auto& row : table.entries) {
    for (const auto& kernel : row) {
      const cudaError_t error =
          cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel.kernel),
                               cudaFuncAttributeMaxDynamicSharedMemorySize, kernel.smem_bytes);
      if (error != cudaSuccess) return error;
    }
  }
  return cudaSuccess;
}

template <class Params>
cudaError_t launch_kernel(const RankGemmKernel<Params>& kernel, const Params& params, int num_ctas,
                          cudaStream_t stream, int num_cluster_ctas = 1) {
  // Cooperative: either all CTAs become resident, or none holds an SM while it waits for a peer.
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeCooperative;
  attributes[0].val.cooperative = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {static_cast<unsigned>(num_cluster_ctas), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(num_ctas);
  config.blockDim = dim3(kernel.num_threads);
  config.dynamicSmemBytes = kernel.smem_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = num_cluster_ctas > 1 ? 2 : 1;
  return cudaLaunchKernelEx(&config, kernel.kernel, params);
}

// The maps of A and B and their boxes; false: no such map can be made. `any` is a valid address for an operand
// without elements. `a_rows`: of this rank's; `max_rows`: those that tiles share out, of any rank's.
bool fill_load(const GemmCall& call, const GemmPlan& plan, int64_t a_rows, int64_t max_rows, const void* any,
               LoadParams* load);
// The same of swapped tiles, where map_a is that of B, transposed, and map_b that of A, of m rows from `a` on.
bool fill_swapped_load(const GemmCall& call, const GemmPlan& plan, const void* a, const void* any,
                       LoadParams* load);
// The same of a call with other addresses.
bool move_load(const GemmCall& call, int64_t a_rows, bool is_swapped, LoadParams* load);

EpilogueParams epilogue_of(const GemmCall& call);
void move_epilogue(const GemmCall& call, EpilogueParams* epilogue);

TileSchedule tiles_of(const GemmCall& call, const RankGemmPlan& plan);

}  // namespace mk
