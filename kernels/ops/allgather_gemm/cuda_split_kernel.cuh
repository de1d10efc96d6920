// SPDX-License-Identifier: MIT
// AllGather+GEMM of few rows as one kernel: the tiles hold all ranks' rows, and the CTAs of a cluster share the
// inner dimension of one, or load B together (split_product.cuh), while their copy warps push this rank's rows.
#pragma once

#include "kernels/device/split_product.cuh"
#include "kernels/ops/allgather_gemm/cuda_kernel.cuh"

namespace mk::allgather_gemm {

using SplitTable = RankGemmTable<CudaParams, NUM_GEMM_SPLIT_TILES>;
const SplitTable& split_kernels_bf16();
const SplitTable& split_kernels_fp16();
// In pairs.
using PairTable = RankGemmTable<CudaParams, NUM_GEMM_PAIR_TILES>;
const PairTable& pair_kernels_bf16();
const PairTable& pair_kernels_fp16();

template <class Config>
struct SplitStorage {
  MainloopStorage<Config> mainloop;  // the stages, and when all CTAs have multiplied, partial sums
  EpilogueBuffers<1> epilogue[Config::NUM_CONSUMER_WARPS];
  PushStorage<NUM_PUSH_WARPS, PUSH_PIECE_BYTES> push;
  PanelBarriers panels;
};

template <class Config>
__device__ __forceinline__ void produce_split(const RankLaunch& launch, SplitStorage<Config>& smem,
                                              const CudaParams& params, const TileWork& work,
                                              const PanelPart& part) {
  GatheredMap map_gathered;
  ptx::prefetch_tensormap(&params.load.map_b);
  const int first_row = work.m_tile * Config::BLOCK_M;
  const Tracer tracer(params.comm.trace, TRACE_LOAD);
  tracer.begin(TraceKind::load, trace_tile(work));
  StageCursor<Config::NUM_STAGES> stages;
  PanelWaits<Config::BLOCK_M, CudaParams> panels(launch, params, smem.panels);
  panels.begin({-1, first_row, params.m, first_row}, work);
  await_pushes(params, smem.push);
  const CUtensorMap* map_a = &params.map_gathered[map_gathered.get(launch)];
  const RowsOfA rows = {map_a, first_row, params.m - first_row};
  TileWork range = work;
#pragma unroll 1
  for (int panel = 0; panel < part.num_panels; ++panel) {
    const auto [begin, end] = part.range(panel);
    range.k_begin = begin;
    range.k_end = end;
    if (panel == 0) {
      load_first_tile<Config>(smem.mainloop, stages, params.load, rows, range, panels);
    } else {
      load_tile<Config>(smem.mainloop, stages, params.load, rows, range, panels);
    }
  }
  await_sharing_ctas<Config>(smem.mainloop, stages);
  tracer.end();
}

template <class Config>
__global__ void __launch_bounds__(Config::NUM_THREADS, 1)
    allgather_gemm_split_kernel(const __grid_constant__ CudaParams params) {
  extern __shared__ __align__(1024) uint8_t smem_bytes[];
  SplitStorage<Config>& smem = *reinterpret_cast<SplitStorage<Config>*>(smem_bytes);
  const RankLaunch launch(params.comm);
  launch.begin_cta();
  const SplitPlace<Config> place;
  // Of each panel a part, and not one of k.
  TileWork work = split_work(params.tiles, place, params.num_split_ctas);
  const PanelPart& part = params.panel_parts[place.index];
  work.k_begin = 0;
  work.k_end = part.num_steps;
  if (threadIdx.x == 0) {
    push_init(smem.push);
    panels_init(smem.panels);
    split_init<Config>(smem.mainloop);
  }
  __syncthreads();
  if constexpr (Config::IN_CLUSTERS) cluster_meet();  // the other one writes to this one's stages
  run_roles<Config>(
      gridDim.x, [&] { produce_split<Config>(launch, smem, params, work, part); },
      [&](const CopyWarp& warp) { run_copy_warp(launch, params, smem.push, &smem.panels, warp); },
      [&](int warpgroup) __attribute__((always_inline)) {
        const SplitProduct product = {params.m, params.epilogue.n, Config::BLOCK_N, params.num_split_ctas,
                                      params.comm.trace};
        consume_split<Config>(smem.mainloop, product, work, place, warpgroup,
                              StoreToC<false>{params.epilogue, smem.epilogue, params.m});
      });
  if (threadIdx.x / 128 == Config::NUM_CONSUMER_WARPGROUPS) meet_split(params.num_split_ctas);
  launch.end_cta();
}

template <GemmTile TILE, class Element, bool B_TRANSPOSED, GemmCluster CLUSTER>
constexpr RankGemmKernel<CudaParams> split_kernel_entry() {
  using Config = GemmConfig<TILE.block_m, TILE.block_n, false, Element, false, B_TRANSPOSED, CLUSTER>;
  static_assert(split_chunks_fit<Config>() && sizeof(SplitStorage<Config>) <= 227 * 1024);
  return {allgather_gemm_split_kernel<Config>, Config::NUM_THREADS, sizeof(SplitStorage<Config>)};
}

template <class Element>
const SplitTable& split_kernel_table() {
  static const SplitTable table = []<size_t... TILES>(std::index_sequence<TILES...>) {
    return SplitTable{{{split_kernel_entry<GEMM_SPLIT_TILES[TILES], Element, false, GemmCluster{1, 1}>(),
                        split_kernel_entry<GEMM_SPLIT_TILES[TILES], Element, true, GemmCluster{1, 1}>()}...}};
  }
  (std::make_index_sequence<NUM_GEMM_SPLIT_TILES>());
  return table;
}

template <class Element>
const PairTable& pair_kernel_table() {
  static const PairTable table = []<size_t... TILES>(std::index_sequence<TILES...>) {
    return PairTable{{{split_kernel_entry<GEMM_PAIR_TILES[TILES], Element, false, GemmCluster{2, 1}>(),
                       split_kernel_entry<GEMM_PAIR_TILES[TILES], Element, true, GemmCluster{2, 1}>()}...}};
  }
  (std::make_index_sequence<NUM_GEMM_PAIR_TILES>());
  return table;
}

}  // namespace mk::allgather_gemm
