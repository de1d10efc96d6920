// SPDX-License-Identifier: MIT
// The product of few tiles, whose inner dimension clusters share, or whose CTAs are in pairs.
#pragma once

#include "kernels/device/split_product.cuh"
#include "kernels/gemm/gemm_kernel.cuh"
#include "kernels/ptx/elect.cuh"

namespace mk {

template <class Config>
struct GemmSplitStorage {
  MainloopStorage<Config> mainloop;  // the stages, and when all CTAs have multiplied, partial sums
  EpilogueBuffers<1> epilogue[Config::NUM_CONSUMER_WARPS];
};

template <class Config>
__global__ void __launch_bounds__(Config::NUM_THREADS, 1)
    gemm_split_kernel(const __grid_constant__ GemmParams params) {
  extern __shared__ __align__(1024) uint8_t smem_bytes[];
  GemmSplitStorage<Config>& smem = *reinterpret_cast<GemmSplitStorage<Config>*>(smem_bytes);
  if (threadIdx.x == 0) {
    mainloop_init<Config>(smem.mainloop);
    trace_enter(params.trace.buffer, params.trace.epoch, params.trace.op, params.trace.shape);
  }
  if constexpr (Config::IN_PAIRS) {
    cluster_sync();
  } else {
    __syncthreads();
  }
  const SplitPlace<Config> place;
  const TileWork work = split_work(params.schedule, place, params.num_split_ctas);
  constexpr bool DEAL_REGISTERS = Config::NUM_CONSUMER_WARPGROUPS > 1;
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (warpgroup == Config::NUM_CONSUMER_WARPGROUPS) {
    if constexpr (DEAL_REGISTERS) ptx::setmaxnreg_dec<40>();
    if (__shfl_sync(~0u, threadIdx.x % 128 / 32, 0) == 0 && ptx::elect_one()) {
      ptx::prefetch_tensormap(&params.load.map_a);
      ptx::prefetch_tensormap(&params.load.map_b);
      const Tracer tracer(params.trace.buffer, TRACE_LOAD);
      tracer.begin(TraceKind::load, trace_tile(work));
      StageCursor<Config::NUM_STAGES> stages;
      const int m = work.m_tile * Config::BLOCK_M;
      load_tile<Config>(smem.mainloop, stages, params.load, {&params.load.map_a, m, params.m - m}, work,
                        AIsReady());
      tracer.end();
    }
    __syncwarp();
    meet_split(params.num_split_ctas);
  } else {
    if constexpr (DEAL_REGISTERS) ptx::setmaxnreg_inc<232>();
    consume_split<Config>(smem.mainloop, smem.epilogue,
                          {params.epilogue, params.m, params.num_split_ctas, params.trace.buffer}, work, place,
                          warpgroup);
  }
  __syncthreads();
  if (threadIdx.x == 0) trace_leave(params.trace.buffer);
}

template <GemmTile TILE, class Element, bool B_TRANSPOSED, bool IN_PAIRS>
constexpr GemmKernelEntry gemm_split_kernel_entry() {
  using Config = GemmConfig<TILE.block_m, TILE.block_n, false, Element, false, B_TRANSPOSED, IN_PAIRS>;
  static_assert(split_chunks_fit<Config>() && sizeof(GemmSplitStorage<Config>) <= 227 * 1024);
  return {gemm_split_kernel<Config>, Config::NUM_THREADS, sizeof(GemmSplitStorage<Config>)};
}

template <class Element>
const GemmSplitKernelTable& gemm_split_kernel_table() {
  static const GemmSplitKernelTable table = []<size_t... TILES>(std::index_sequence<TILES...>) {
    return GemmSplitKernelTable{
        {{gemm_split_kernel_entry<GEMM_SPLIT_TILES[TILES], Element, false, false>(),
          gemm_split_kernel_entry<GEMM_SPLIT_TILES[TILES], Element, true, false>()}...}};
  }
  (std::make_index_sequence<NUM_GEMM_SPLIT_TILES>());
  return table;
}

template <class Element>
const GemmPairKernelTable& gemm_pair_kernel_table() {
  static const GemmPairKernelTable table = []<size_t... TILES>(std::index_sequence<TILES...>) {
    return GemmPairKernelTable{{{gemm_split_kernel_entry<GEMM_PAIR_TILES[TILES], Element, false, true>(),
                                 gemm_split_kernel_entry<GEMM_PAIR_TILES[TILES], Element, true, true>()}...}};
  }
  (std::make_index_sequence<NUM_GEMM_PAIR_TILES>());
  return table;
}

}  // namespace mk
