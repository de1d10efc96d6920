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

// With the operands in each other's place.
using SwappedTable = RankGemmTable<CudaParams, NUM_RANK_SWAPPED_TILES>;
const SwappedTable& swapped_kernels_bf16();
const SwappedTable& swapped_kernels_fp16();

template <class Config, bool IS_SWAPPED>
struct SplitStorage {
  MainloopStorage<Config> mainloop;  // the stages, and when all CTAs have multiplied, partial sums
  EpilogueBuffers<1> epilogue[IS_SWAPPED ? 1 : Config::NUM_CONSUMER_WARPS];
  PushStorage<NUM_PUSH_WARPS, PUSH_PIECE_BYTES> push;
};

// Columns of a tile: swapped, rows of the gathered matrix, as gemm_plan_tile_columns() has them.
template <class Config, bool IS_SWAPPED>
__device__ __forceinline__ int tile_columns(const CudaParams& params) {
  if constexpr (!IS_SWAPPED) return Config::BLOCK_N;
  return even_columns(params.m, params.tiles.num_n_tiles * Config::CLUSTER.n);
}

template <class Config>
__device__ __forceinline__ void produce_split(const RankLaunch& launch, SplitStorage<Config, false>& smem,
                                              const CudaParams& params, const TileWork& work) {
  GatheredMap map_gathered(launch, params);
  ptx::prefetch_tensormap(&params.load.map_b);
  const int first_row = work.m_tile * Config::BLOCK_M;
  const Tracer tracer(params.comm.trace, TRACE_LOAD);
  tracer.begin(TraceKind::load, trace_tile(work));
  StageCursor<Config::NUM_STAGES> stages;
  PanelWaits<Config::BLOCK_M, CudaParams> panels(launch, params);
  panels.begin({-1, first_row, params.m, first_row}, work);
  await_pushes(params, smem.push);
  const CUtensorMap* map_a = &params.map_gathered[map_gathered.get(launch)];
  load_first_tile<Config>(smem.mainloop, stages, params.load, {map_a, first_row, params.m - first_row}, work,
                          panels);
  await_sharing_ctas<Config>(smem.mainloop, stages);
  tracer.end();
}

// The same with the operands in each other's place: what the stages hold as A is B transposed, which never
// waits.
template <class Config>
__device__ __forceinline__ void produce_swapped(const RankLaunch& launch, SplitStorage<Config, true>& smem,
                                                const CudaParams& params, const TileWork& work) {
  GatheredMap map_gathered(launch, params);
  ptx::prefetch_tensormap(&params.load.map_a);
  const int num_rows = tile_columns<Config, true>(params);
  const int first_row = work.n_tile * num_rows;
  const int first_column = work.m_tile * Config::BLOCK_M;
  const Tracer tracer(params.comm.trace, TRACE_LOAD);
  tracer.begin(TraceKind::load, trace_tile(work));
  PanelWaits<Config::BLOCK_N, CudaParams> panels(launch, params);
  panels.begin({-1, first_row, min(first_row + num_rows, params.m), first_row}, work);
  await_pushes(params, smem.push);
  const CUtensorMap* map_rows = &params.map_gathered[map_gathered.get(launch)];

  const StageBoxes b_boxes = a_stage_boxes<Config>(params.load, params.epilogue.n - first_column);
  const StageBoxes row_boxes = b_stage_boxes<Config>(params.load, first_row, num_rows);
  StageCursor<Config::NUM_STAGES> stages;
  const auto load_b = [&](int stage, int k_step) {
    ptx::mbarrier_arrive_expect_tx(&smem.mainloop.stage_full[stage], b_boxes.bytes() + row_boxes.bytes());
    load_a_stage<Config>(smem.mainloop, stage, &params.load.map_a, b_boxes, first_column,
                         k_step * Config::BLOCK_K);
  };
  const auto load_rows = [&](int k_step) {
    panels(k_step);
    load_b_stage<Config>(smem.mainloop, stages.stage, map_rows, row_boxes, first_row, k_step * Config::BLOCK_K,
                         num_rows);
    stages.advance();
  };
  // As in load_first_tile().
  const int num_first = min(work.k_end - work.k_begin, Config::NUM_STAGES);
  for (int i = 0; i < num_first; ++i) load_b(i, work.k_begin + i);
  for (int i = 0; i < num_first; ++i) load_rows(work.k_begin + i);
  for (int k_step = work.k_begin + num_first; k_step < work.k_end; ++k_step) {
    mbarrier_wait(&smem.mainloop.stage_empty[stages.stage], stages.phase ^ 1);
    load_b(stages.stage, k_step);
    load_rows(k_step);
  }
  await_sharing_ctas<Config>(smem.mainloop, stages);
  tracer.end();
}

template <class Config, bool IS_SWAPPED>
__global__ void __launch_bounds__(Config::NUM_THREADS, 1)
    allgather_gemm_split_kernel(const __grid_constant__ CudaParams params) {
  extern __shared__ __align__(1024) uint8_t smem_bytes[];
  using Storage = SplitStorage<Config, IS_SWAPPED>;
  Storage& smem = *reinterpret_cast<Storage*>(smem_bytes);
  const RankLaunch launch(params.comm);
  launch.begin_cta();
  const SplitPlace<Config> place;
  const TileWork work = split_work(params.tiles, place, params.num_split_ctas);
  if (threadIdx.x == 0) {
    push_init(smem.push);
    split_init<Config>(smem.mainloop);
  }
  __syncthreads();
  if constexpr (Config::IN_CLUSTERS) cluster_meet();  // the other one writes to this one's stages
  run_roles<Config>(
      gridDim.x,
      [&] {
        if constexpr (IS_SWAPPED) {
          produce_swapped<Config>(launch, smem, params, work);
        } else {
          produce_split<Config>(launch, smem, params, work);
        }
      },
      [&](const CopyWarp& warp) { run_copy_warp(launch, params, smem.push, warp); },
      [&](int warpgroup) {
        const SplitProduct product = {
            IS_SWAPPED ? params.epilogue.n : params.m, IS_SWAPPED ? params.m : params.epilogue.n,
            tile_columns<Config, IS_SWAPPED>(params), params.num_split_ctas, params.comm.trace};
        consume_split<Config>(smem.mainloop, product, work, place, warpgroup,
                              StoreToC<IS_SWAPPED>{params.epilogue, smem.epilogue, params.m});
      });
  if (threadIdx.x / 128 == Config::NUM_CONSUMER_WARPGROUPS) meet_split(params.num_split_ctas);
  launch.end_cta();
}

template <GemmTile TILE, class Element, bool B_TRANSPOSED, GemmCluster CLUSTER>
constexpr RankGemmKernel<CudaParams> split_kernel_entry() {
  using Config = GemmConfig<TILE.block_m, TILE.block_n, false, Element, false, B_TRANSPOSED, CLUSTER>;
  static_assert(split_chunks_fit<Config>() && sizeof(SplitStorage<Config, false>) <= 227 * 1024);
  return {allgather_gemm_split_kernel<Config, false>, Config::NUM_THREADS, sizeof(SplitStorage<Config, false>)};
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

template <GemmSwappedTile TILE, class Element, bool B_TRANSPOSED>
constexpr RankGemmKernel<CudaParams> swapped_kernel_entry() {
  using Config = GemmConfig<TILE.block_m, TILE.block_n, false, Element, !B_TRANSPOSED, true, TILE.cluster>;
  static_assert(sizeof(SplitStorage<Config, true>) <= 227 * 1024);
  return {allgather_gemm_split_kernel<Config, true>, Config::NUM_THREADS, sizeof(SplitStorage<Config, true>)};
}

template <class Element>
const SwappedTable& swapped_kernel_table() {
  static const SwappedTable table = []<size_t... TILES>(std::index_sequence<TILES...>) {
    return SwappedTable{{{swapped_kernel_entry<RANK_SWAPPED_TILES[TILES], Element, false>(),
                          swapped_kernel_entry<RANK_SWAPPED_TILES[TILES], Element, true>()}...}};
  }
  (std::make_index_sequence<NUM_RANK_SWAPPED_TILES>());
  return table;
}

}  // namespace mk::allgather_gemm
