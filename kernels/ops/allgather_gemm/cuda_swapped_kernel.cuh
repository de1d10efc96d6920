// SPDX-License-Identifier: MIT
// AllGather+GEMM of some hundred rows as one kernel, the operands in each other's place: tiles of B's columns
// by any multiple of eight of all ranks' rows, in clusters whose CTAs share what they load
// (swapped_product.cuh), while their copy warps push this rank's rows.
#pragma once

#include "kernels/device/swapped_product.cuh"
#include "kernels/ops/allgather_gemm/cuda_kernel.cuh"

namespace mk::allgather_gemm {

using SwappedTable = RankGemmTable<CudaParams, NUM_RANK_SWAPPED_TILES>;
const SwappedTable& swapped_kernels_bf16();
const SwappedTable& swapped_kernels_fp16();

template <class Config>
struct SwappedStorage {
  MainloopStorage<Config> mainloop;
  PushStorage<NUM_PUSH_WARPS, PUSH_PIECE_BYTES> push;
  PanelBarriers panels;
};

// Of the gathered matrix, from one tile to the next, as gemm_plan_tile_columns() has them.
template <class Config>
__device__ __forceinline__ int tile_rows(const CudaParams& params) {
  return even_columns(params.m, params.tiles.num_n_tiles * Config::CLUSTER.n);
}

// What the stages hold as A is B transposed, which never waits.
template <class Config>
__device__ __forceinline__ void produce_swapped(const RankLaunch& launch, SwappedStorage<Config>& smem,
                                                const CudaParams& params) {
  GatheredMap map_gathered;
  ptx::prefetch_tensormap(&params.load.map_a);
  const int num_rows = tile_rows<Config>(params);
  ClusterTileCursor<Config, LateTileSchedule> tiles(params.late_tiles);
  StageCursor<Config::NUM_STAGES> stages;
  PanelWaits<Config::BLOCK_N, CudaParams> panels(launch, params, smem.panels);
  bool is_first = true;
  TileWork work;
  while (tiles.next(&work)) {
    const int first_row = work.n_tile * num_rows;
    const int first_column = work.m_tile * Config::BLOCK_M;
    const Tracer tracer(params.comm.trace, TRACE_LOAD);
    tracer.begin(TraceKind::load, trace_tile(work));
    TileWork of_rows = work;
    of_rows.m_tile = work.n_tile;
    panels.begin({-1, first_row, min(first_row + num_rows, params.m), first_row}, of_rows);
    if (is_first) await_pushes(params, smem.push);
    const StageBoxes b_boxes = a_stage_boxes<Config>(params.load, params.epilogue.n - first_column);
    const StageBoxes row_boxes = b_stage_boxes<Config>(params.load, first_row, num_rows);
    const CUtensorMap* map_rows = &params.map_gathered[map_gathered.get(launch)];
    const auto load_b = [&](int stage, int k_step) {
      ptx::mbarrier_arrive_expect_tx(&smem.mainloop.stage_full[stage], b_boxes.bytes() + row_boxes.bytes());
      load_a_stage<Config>(smem.mainloop, stage, &params.load.map_a, b_boxes, first_column,
                           k_step * Config::BLOCK_K);
    };
    const auto load_rows = [&](int k_step) {
      panels(k_step);
      load_b_stage<Config>(smem.mainloop, stages.stage, map_rows, row_boxes, first_row,
                           k_step * Config::BLOCK_K, num_rows);
      stages.advance();
    };
    // As in load_first_tile().
    const int num_first = is_first ? min(work.k_end - work.k_begin, Config::NUM_STAGES) : 0;
    for (int i = 0; i < num_first; ++i) load_b(i, work.k_begin + i);
    for (int i = 0; i < num_first; ++i) load_rows(work.k_begin + i);
    for (int k_step = work.k_begin + num_first; k_step < work.k_end; ++k_step) {
      mbarrier_wait(&smem.mainloop.stage_empty[stages.stage], stages.phase ^ 1);
      load_b(stages.stage, k_step);
      load_rows(k_step);
    }
    is_first = false;
    tracer.end();
  }
  await_sharing_ctas<Config>(smem.mainloop, stages);
}

template <class Config>
__global__ void __launch_bounds__(Config::NUM_THREADS, 1)
    allgather_gemm_swapped_kernel(const __grid_constant__ CudaParams params) {
  extern __shared__ __align__(1024) uint8_t smem_bytes[];
  SwappedStorage<Config>& smem = *reinterpret_cast<SwappedStorage<Config>*>(smem_bytes);
  const RankLaunch launch(params.comm);
  launch.begin_cta();
  if (threadIdx.x == 0) {
    push_init(smem.push);
    panels_init(smem.panels);
    mainloop_init<Config>(smem.mainloop);
  }
  __syncthreads();
  cluster_meet();  // others write to this one's stages
  run_roles<Config>(
      gridDim.x, [&] { produce_swapped<Config>(launch, smem, params); },
      [&](const CopyWarp& warp) { run_copy_warp(launch, params, smem.push, &smem.panels, warp); },
      [&](int warpgroup) __attribute__((always_inline)) {
        const SwappedProduct product = {params.epilogue,           params.m,
                                        tile_rows<Config>(params), partials_layout<Config>(),
                                        params.comm.partials,      params.comm.trace};
        consume_swapped(smem.mainloop, product, params.late_tiles, warpgroup);
      });
  launch.end_cta();
}

template <GemmSwappedTile TILE, class Element, bool B_TRANSPOSED>
constexpr RankGemmKernel<CudaParams> swapped_kernel_entry() {
  using Config = GemmConfig<TILE.block_m, TILE.block_n, false, Element, !B_TRANSPOSED, true, TILE.cluster>;
  static_assert(Config::IN_CLUSTERS && sizeof(SwappedStorage<Config>) <= 227 * 1024);
  return {allgather_gemm_swapped_kernel<Config>, Config::NUM_THREADS, sizeof(SwappedStorage<Config>)};
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
