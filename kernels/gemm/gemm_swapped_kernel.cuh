// SPDX-License-Identifier: MIT
// The product with its operands in each other's place, C^T = B^T A^T: a tile has 128 or 256 of B's columns
// where others have rows, and of the rows of A as many as a multiple of 8 allows, where other tiles have 64 or
// 128. For some hundred rows, whose last tile would be half empty and whose B would be read by several tiles.
// Here the tiles that CTAs, or clusters that share what they load, have one after the other, whole or cut along
// k; those of which each has one, and whose k CTAs may share, are in gemm_split_kernel.cuh.
#pragma once

#include "kernels/device/swapped_product.cuh"
#include "kernels/gemm/gemm_split_kernel.cuh"
#include "kernels/ptx/grid_dependency.cuh"

namespace mk {

template <class Config>
__global__ void __launch_bounds__(Config::NUM_THREADS, 1)
    gemm_swapped_kernel(const __grid_constant__ GemmParams params) {
  extern __shared__ __align__(1024) uint8_t smem_bytes[];
  MainloopStorage<Config>& smem = *reinterpret_cast<MainloopStorage<Config>*>(smem_bytes);
  if (threadIdx.x == 0) {
    mainloop_init<Config>(smem);
    if (params.trace.buffer != nullptr) ptx::await_previous_grid();
    trace_enter(params.trace.buffer, params.trace.epoch, params.trace.op, params.trace.shape);
  }
  __syncthreads();
  if constexpr (Config::IN_CLUSTERS) cluster_meet();  // others write to this one's stages
  static_assert(Config::NUM_CONSUMER_WARPGROUPS == 2);
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (warpgroup == 2) {
    ptx::setmaxnreg_dec<40>();
    const int warp = __shfl_sync(~0u, threadIdx.x % 128 / 32, 0);
    if (warp == 0 && ptx::elect_one()) {
      ptx::prefetch_tensormap(&params.load.map_b);
      ptx::await_previous_grid();
      load_tiles_of_cta<Config, false>(smem, params.load, params.m, params.tile_columns, params.schedule,
                                       params.trace.buffer);
      if (params.lets_next_come) ptx::let_next_grid_come();
    } else if (warp == 1 && ptx::elect_one()) {
      ptx::prefetch_tensormap(&params.load.map_a);
      ptx::await_previous_grid();
      load_tiles_of_cta<Config, true>(smem, params.load, params.m, params.tile_columns, params.schedule,
                                      params.trace.buffer);
    }
    __syncwarp();
  } else {
    ptx::setmaxnreg_inc<232>();
    ptx::await_previous_grid();
    const SwappedProduct product = {
        params.epilogue,     params.load.n,
        params.tile_columns, PartialsLayout(gridDim.x, Config::BLOCK_M, Config::BLOCK_N),
        params.workspace,    params.trace.buffer};
    consume_swapped(smem, product, params.schedule, warpgroup);
  }
  __syncthreads();
  if (threadIdx.x == 0) trace_leave(params.trace.buffer);
}

template <GemmSwappedTile TILE, class Element, bool B_TRANSPOSED>
constexpr GemmKernelEntry gemm_swapped_kernel_entry() {
  if constexpr (gemm_swapped_tile_walks(TILE)) {
    using Config =
        GemmConfig<TILE.block_m, TILE.block_n, false, Element, !B_TRANSPOSED, true, TILE.cluster, 224>;
    static_assert(sizeof(MainloopStorage<Config>) <= 227 * 1024);
    return {gemm_swapped_kernel<Config>, Config::NUM_THREADS, sizeof(MainloopStorage<Config>)};
  } else {
    return gemm_split_kernel_entry<TILE.block_m, TILE.block_n, Element, B_TRANSPOSED, TILE.cluster, true>();
  }
}

template <class Element, bool B_TRANSPOSED>
const GemmSwappedKernelTable& gemm_swapped_kernel_table() {
  static const GemmSwappedKernelTable table = []<size_t... TILES>(std::index_sequence<TILES...>) {
    return GemmSwappedKernelTable{
        {gemm_swapped_kernel_entry<GEMM_SWAPPED_TILES[TILES], Element, B_TRANSPOSED>()...}};
  }
  (std::make_index_sequence<NUM_GEMM_SWAPPED_TILES>());
  return table;
}

}  // namespace mk
