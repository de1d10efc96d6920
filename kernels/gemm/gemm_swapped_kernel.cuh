// SPDX-License-Identifier: MIT
// The product with its operands in each other's place, C^T = B^T A^T: a tile has 256 of B's columns where
// others have rows, and of the rows of A as many as a multiple of 8 allows, where other tiles have 64 or 128.
// For some hundred rows, whose last tile would be half empty and whose B would be read by several tiles.
#pragma once

#include "kernels/device/swapped_epilogue.cuh"
#include "kernels/gemm/gemm_kernel.cuh"

namespace mk {

struct GemmSwappedKernelTable {
  GemmKernelEntry entries[NUM_GEMM_SWAPPED_TILES][2];  // KN, NK
};
const GemmSwappedKernelTable& gemm_swapped_kernels_bf16();
const GemmSwappedKernelTable& gemm_swapped_kernels_fp16();

// finish_rows() of such a tile: `block` is which 64 of its columns of B. What params call A is B transposed.
template <class Config>
__device__ __forceinline__ void finish_columns(const GemmParams& params, const TileWork& work, int block,
                                               float (&accumulators)[Config::BLOCK_N / 2]) {
  const int n = work.m_tile * Config::BLOCK_M + block * 64 + static_cast<int>(threadIdx.x) / 32 % 4 * 16;
  const bool has_columns = n < params.m;
  const PartialsLayout partials(gridDim.x, Config::BLOCK_M, Config::BLOCK_N);
  if (!work.is_owner) {
    partials_store(accumulators, partials, params.workspace, blockIdx.x, block, has_columns);
    return;
  }
  if (work.num_peers > 0) {
    partials_add(
        accumulators, partials, params.workspace, [&](int peer) { return work.first_peer + peer; },
        work.num_peers, block, has_columns);
  }
  store_tile_columns(accumulators, params.epilogue, work.n_tile * Config::BLOCK_N, params.load.n, n);
}

template <class Config>
__global__ void __launch_bounds__(Config::NUM_THREADS, 1)
    gemm_swapped_kernel(const __grid_constant__ GemmParams params) {
  extern __shared__ __align__(1024) uint8_t smem_bytes[];
  GemmStorage<Config>& smem = *reinterpret_cast<GemmStorage<Config>*>(smem_bytes);
  if (threadIdx.x == 0) {
    mainloop_init<Config>(smem.mainloop);
    trace_enter(params.trace.buffer, params.trace.epoch, params.trace.op, params.trace.shape);
  }
  __syncthreads();
  static_assert(Config::NUM_CONSUMER_WARPGROUPS == 2);
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (warpgroup == 2) {
    ptx::setmaxnreg_dec<40>();
    producer_role<Config, true>(smem, params);
  } else {
    ptx::setmaxnreg_inc<232>();
    TileCursor tiles(params.schedule, blockIdx.x);
    consumer_role<Config, TileWork, TilesAre::plain>(
        smem.mainloop, warpgroup, params.trace.buffer, [&](TileWork* work) { return tiles.next(work); },
        [&](const TileWork& work, int block, float(&accumulators)[Config::BLOCK_N / 2]) {
          finish_columns<Config>(params, work, block, accumulators);
        });
  }
  __syncthreads();
  if (threadIdx.x == 0) trace_leave(params.trace.buffer);
}

template <GemmTile TILE, class Element, bool B_TRANSPOSED>
constexpr GemmKernelEntry gemm_swapped_kernel_entry() {
  using Config = GemmConfig<TILE.block_m, TILE.block_n, false, Element, !B_TRANSPOSED, true>;
  static_assert(sizeof(GemmStorage<Config>) <= 227 * 1024);
  return {gemm_swapped_kernel<Config>, Config::NUM_THREADS, sizeof(GemmStorage<Config>)};
}

template <class Element>
const GemmSwappedKernelTable& gemm_swapped_kernel_table() {
  static const GemmSwappedKernelTable table = []<size_t... TILES>(std::index_sequence<TILES...>) {
    return GemmSwappedKernelTable{{{gemm_swapped_kernel_entry<GEMM_SWAPPED_TILES[TILES], Element, false>(),
                                    gemm_swapped_kernel_entry<GEMM_SWAPPED_TILES[TILES], Element, true>()}...}};
  }
  (std::make_index_sequence<NUM_GEMM_SWAPPED_TILES>());
  return table;
}

}  // namespace mk
