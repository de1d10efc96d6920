// SPDX-License-Identifier: MIT
// GEMM+ReduceScatter and GEMM+AllReduce of some hundred rows as one kernel, the operands in each other's place:
// tiles of B's columns by any multiple of eight rows, in clusters whose CTAs share what they load
// (swapped_product.cuh).
#pragma once

#include "kernels/device/swapped_product.cuh"
#include "kernels/ops/gemm_reduce_scatter/cuda_swapped_exchange.cuh"

namespace mk::gemm_reduce_scatter::swapped {

using SwappedTable = RankGemmTable<SwappedParams, NUM_RANK_SWAPPED_TILES>;
const SwappedTable& kernels_bf16();
const SwappedTable& kernels_fp16();

// A consumer warpgroup: its part of every tile of the CTA goes to the owners, who are told when both have.
template <class Config>
__device__ __forceinline__ void exchange_tiles(const RankLaunch& launch, MainloopStorage<Config>& smem,
                                               const SwappedParams& params, int warpgroup) {
  const int tile_rows = params.swapped_tiles.tile_rows;
  const ExchangeColumns exchange = {launch, params};
  ClusterTileCursor<Config, TileSchedule> tiles(params.tiles);
  consumer_role<Config>(
      smem, warpgroup, params.comm.trace, [&](TileWork* work) { return tiles.next(work); },
      [&](const TileWork& work, int block, float(&accumulators)[Config::BLOCK_N / 2]) {
        const int warp = static_cast<int>(threadIdx.x) / 32 % 4;
        const int row = work.n_tile * tile_rows;
        exchange(accumulators, work.m_tile * Config::BLOCK_M + block * 64 + warp * 16, row,
                 min(params.m, row + tile_rows));
        if (block % Config::NUM_ROW_BLOCKS == Config::NUM_ROW_BLOCKS - 1)
          raise_flags<Config>(launch, params, work);
      });
}

template <class Config>
__global__ void __launch_bounds__(Config::NUM_THREADS, 1)
    swapped_reduction_kernel(const __grid_constant__ SwappedParams params) {
  extern __shared__ __align__(1024) uint8_t smem_bytes[];
  MainloopStorage<Config>& smem = *reinterpret_cast<MainloopStorage<Config>*>(smem_bytes);
  const RankLaunch launch(params.comm);
  launch.begin_cta();
  if (threadIdx.x == 0) mainloop_init<Config>(smem);
  __syncthreads();
  cluster_meet();  // others write to this one's stages
  const int tile_rows = params.swapped_tiles.tile_rows;
  run_roles<Config>(
      gridDim.x,
      [&] {
        ptx::prefetch_tensormap(&params.load.map_b);
        load_tiles_of_cta<Config, false>(smem, params.load, params.output.n, tile_rows, params.tiles,
                                         params.comm.trace);
      },
      [&](const CopyWarp& warp) {
        if (warp.warp == 0 && ptx::elect_one()) {
          ptx::prefetch_tensormap(&params.load.map_a);
          load_tiles_of_cta<Config, true>(smem, params.load, params.output.n, tile_rows, params.tiles,
                                          params.comm.trace);
        }
        __syncwarp();
        if (warp.greets()) launch.greet();
      },
      [&](int warpgroup) __attribute__((always_inline)) {
        exchange_tiles<Config>(launch, smem, params, warpgroup);
        finish_units<Config>(launch, params);
        if (params.reduction == Reduction::two_shot) gather_units<Config>(launch, params);
      });
  launch.end_cta();
}

template <GemmSwappedTile TILE, class Element, bool B_TRANSPOSED>
constexpr RankGemmKernel<SwappedParams> kernel_entry() {
  using Config = GemmConfig<TILE.block_m, TILE.block_n, false, Element, !B_TRANSPOSED, true, TILE.cluster, 224>;
  static_assert(Config::IN_CLUSTERS && sizeof(MainloopStorage<Config>) <= 227 * 1024);
  return {swapped_reduction_kernel<Config>, Config::NUM_THREADS, sizeof(MainloopStorage<Config>)};
}

template <class Element>
const SwappedTable& kernel_table() {
  static const SwappedTable table = []<size_t... TILES>(std::index_sequence<TILES...>) {
    return SwappedTable{{{kernel_entry<RANK_SWAPPED_TILES[TILES], Element, false>(),
                          kernel_entry<RANK_SWAPPED_TILES[TILES], Element, true>()}...}};
  }
  (std::make_index_sequence<NUM_RANK_SWAPPED_TILES>());
  return table;
}

}  // namespace mk::gemm_reduce_scatter::swapped
