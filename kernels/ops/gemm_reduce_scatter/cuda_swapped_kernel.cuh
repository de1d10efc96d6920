// SPDX-License-Identifier: MIT
// GEMM+ReduceScatter and GEMM+AllReduce of some hundred rows as one kernel, the operands in each other's place:
// tiles of B's columns by any multiple of eight rows, all at once, whose CTAs share what they load
// (split_product.cuh).
#pragma once

#include "kernels/device/split_product.cuh"
#include "kernels/ops/gemm_reduce_scatter/cuda_swapped_exchange.cuh"

namespace mk::gemm_reduce_scatter::swapped {

using SwappedTable = RankGemmTable<SwappedParams, NUM_RANK_SWAPPED_TILES>;
const SwappedTable& kernels_bf16();
const SwappedTable& kernels_fp16();

template <class Config>
__global__ void __launch_bounds__(Config::NUM_THREADS, 1)
    swapped_reduction_kernel(const __grid_constant__ SwappedParams params) {
  extern __shared__ __align__(1024) uint8_t smem_bytes[];
  MainloopStorage<Config>& smem = *reinterpret_cast<MainloopStorage<Config>*>(smem_bytes);
  const RankLaunch launch(params.comm);
  launch.begin_cta();
  const SplitPlace<Config> place;
  const TileWork work = split_work(params.tiles, place, 1);
  const int tile_rows = params.swapped_tiles.tile_rows;
  if (threadIdx.x == 0) split_init<Config>(smem);
  __syncthreads();
  cluster_meet();  // others write to this one's stages
  const int first_column = work.m_tile * Config::BLOCK_M;
  const RowsOfA columns = {&params.load.map_a, first_column, params.output.n - first_column};
  run_roles<Config>(
      gridDim.x,
      [&] {
        ptx::prefetch_tensormap(&params.load.map_b);
        const Tracer tracer(params.comm.trace, TRACE_LOAD);
        tracer.begin(TraceKind::load, trace_tile(work));
        load_operand<Config, false>(smem, params.load, columns, tile_rows, work);
        tracer.end();
      },
      [&](const CopyWarp& warp) {
        if (warp.warp == 0 && ptx::elect_one()) {
          ptx::prefetch_tensormap(&params.load.map_a);
          load_operand<Config, true>(smem, params.load, columns, tile_rows, work);
        }
        __syncwarp();
        if (warp.greets()) launch.greet();
      },
      [&](int warpgroup) {
        const SplitProduct product = {params.output.n, params.m, tile_rows, 1, params.comm.trace};
        consume_split<Config>(smem, product, work, place, warpgroup, ExchangeColumns{launch, params});
        raise_flags<Config>(launch, params, work);
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
