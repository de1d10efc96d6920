// SPDX-License-Identifier: MIT
// The product of few tiles, whose inner dimension clusters share, or whose CTAs share what they load; with the
// operands in each other's place, too.
#pragma once

#include "kernels/device/split_product.cuh"
#include "kernels/gemm/gemm_kernel.cuh"
#include "kernels/ptx/elect.cuh"
#include "kernels/ptx/grid_dependency.cuh"

namespace mk {

template <class Config, bool IS_SWAPPED>
struct GemmSplitStorage {
  MainloopStorage<Config> mainloop;  // the stages, and when all CTAs have multiplied, partial sums
  EpilogueBuffers<1> epilogue[IS_SWAPPED ? 1 : Config::NUM_CONSUMER_WARPS];  // swapped tiles need none
};

template <class Config, bool IS_SWAPPED>
__global__ void __launch_bounds__(Config::NUM_THREADS, 1)
    gemm_split_kernel(const __grid_constant__ GemmParams params) {
  extern __shared__ __align__(1024) uint8_t smem_bytes[];
  GemmSplitStorage<Config, IS_SWAPPED>& smem =
      *reinterpret_cast<GemmSplitStorage<Config, IS_SWAPPED>*>(smem_bytes);
  const SplitPlace<Config> place;
  const TileWork work = split_work(params.schedule, place, params.num_split_ctas);
  if (threadIdx.x == 0) {
    split_init<Config>(smem.mainloop);
    if (params.trace.buffer != nullptr) ptx::await_previous_grid();
    trace_enter(params.trace.buffer, params.trace.epoch, params.trace.op, params.trace.shape);
  }
  __syncthreads();
  if constexpr (Config::IN_CLUSTERS) cluster_meet();  // others write to this one's stages
  constexpr bool DEAL_REGISTERS = Config::NUM_CONSUMER_WARPGROUPS > 1;
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (warpgroup == Config::NUM_CONSUMER_WARPGROUPS) {
    if constexpr (DEAL_REGISTERS) ptx::setmaxnreg_dec<40>();
    const int warp = __shfl_sync(~0u, threadIdx.x % 128 / 32, 0);
    const int m = work.m_tile * Config::BLOCK_M;
    const RowsOfA rows = {&params.load.map_a, m, params.m - m};
    if (warp == 0 && ptx::elect_one()) {
      ptx::prefetch_tensormap(&params.load.map_b);
      ptx::await_previous_grid();
      const Tracer tracer(params.trace.buffer, TRACE_LOAD);
      tracer.begin(TraceKind::load, trace_tile(work));
      load_operand<Config, false>(smem.mainloop, params.load, rows, params.tile_columns, work);
      if (params.lets_next_come) ptx::let_next_grid_come();
      tracer.end();
    } else if (warp == 1 && ptx::elect_one()) {
      ptx::prefetch_tensormap(&params.load.map_a);
      ptx::await_previous_grid();
      load_operand<Config, true>(smem.mainloop, params.load, rows, params.tile_columns, work);
    }
    __syncwarp();
    meet_split(params.num_split_ctas);
  } else {
    if constexpr (DEAL_REGISTERS) ptx::setmaxnreg_inc<232>();
    ptx::await_previous_grid();
    consume_split<Config>(
        smem.mainloop,
        {params.m, params.load.n, params.tile_columns, params.num_split_ctas, params.trace.buffer}, work, place,
        warpgroup, StoreToC<IS_SWAPPED>{params.epilogue, smem.epilogue, params.m});
  }
  __syncthreads();
  if (threadIdx.x == 0) trace_leave(params.trace.buffer);
}

// Swapped, what is loaded as A is B transposed, and as B, A transposed.
template <int BLOCK_M, int BLOCK_N, class Element, bool B_TRANSPOSED, GemmCluster CLUSTER,
          bool IS_SWAPPED = false>
constexpr GemmKernelEntry gemm_split_kernel_entry() {
  using Config = GemmConfig<BLOCK_M, BLOCK_N, false, Element, IS_SWAPPED && !B_TRANSPOSED,
                            IS_SWAPPED || B_TRANSPOSED, CLUSTER, IS_SWAPPED ? 224 : 192>;
  static_assert(split_chunks_fit<Config>() && sizeof(GemmSplitStorage<Config, IS_SWAPPED>) <= 227 * 1024);
  return {gemm_split_kernel<Config, IS_SWAPPED>, Config::NUM_THREADS,
          sizeof(GemmSplitStorage<Config, IS_SWAPPED>)};
}

template <GemmTile TILE, class Element, bool B_TRANSPOSED, GemmCluster CLUSTER>
constexpr GemmKernelEntry gemm_split_kernel_entry() {
  return gemm_split_kernel_entry<TILE.block_m, TILE.block_n, Element, B_TRANSPOSED, CLUSTER>();
}

template <class Element>
const GemmSplitKernelTable& gemm_split_kernel_table() {
  static const GemmSplitKernelTable table = []<size_t... TILES>(std::index_sequence<TILES...>) {
    return GemmSplitKernelTable{
        {{gemm_split_kernel_entry<GEMM_SPLIT_TILES[TILES], Element, false, GemmCluster{1, 1}>(),
          gemm_split_kernel_entry<GEMM_SPLIT_TILES[TILES], Element, true, GemmCluster{1, 1}>()}...}};
  }
  (std::make_index_sequence<NUM_GEMM_SPLIT_TILES>());
  return table;
}

template <class Element>
const GemmPairKernelTable& gemm_pair_kernel_table() {
  static const GemmPairKernelTable table = []<size_t... TILES>(std::index_sequence<TILES...>) {
    return GemmPairKernelTable{
        {{gemm_split_kernel_entry<GEMM_PAIR_TILES[TILES], Element, false, GemmCluster{2, 1}>(),
          gemm_split_kernel_entry<GEMM_PAIR_TILES[TILES], Element, true, GemmCluster{2, 1}>()}...}};
  }
  (std::make_index_sequence<NUM_GEMM_PAIR_TILES>());
  return table;
}

}  // namespace mk
