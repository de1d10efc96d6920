// SPDX-License-Identifier: MIT
// AllGather+GEMM in mode WGRAD as one persistent kernel: C = dY^T * gathered X. Rows of X travel as those of A
// do in mode FORWARD; they are the inner dimension, so that each tile takes this rank's first, and then the
// others' as they arrive.
#pragma once

#include "kernels/ops/allgather_gemm/cuda_kernel.cuh"
#include "kernels/ops/allgather_gemm/wgrad_order.h"

namespace mk::allgather_gemm {

// In `load`, map_a is that of dY, and map_b that of this rank's X (WgradMap::own); map_gathered is
// WgradMap::whole.
struct WgradParams : CudaParams {
  CUtensorMap map_last[3];
  WgradOrder wgrad_order;
  int c_rows;
};

using WgradTable = RankGemmTable<WgradParams, NUM_WGRAD_TILES>;
const WgradTable& wgrad_kernels_bf16();
const WgradTable& wgrad_kernels_fp16();

// Between nodes the order is another (cuda_network_wgrad.cuh).
__device__ __forceinline__ WgradStep wgrad_step(const WgradParams& params, int k_step) {
  return params.wgrad_order.at(k_step);
}

// 64 rows of X.
template <class Config>
__device__ __forceinline__ void load_x_stage(const RankLaunch& launch, MainloopStorage<Config>& smem, int stage,
                                             const WgradParams& params, GatheredMap& gathered,
                                             const WgradStep& step, const StageBoxes& boxes, int column) {
  const WgradPlace place =
      wgrad_place(step.source, params.comm.rank, rows_of(params, step.source), params.max_rows);
  const CUtensorMap* map = place.map == WgradMap::own     ? &params.load.map_b
                           : place.map == WgradMap::whole ? &params.map_gathered[gathered.get(launch)]
                                                          : &params.map_last[gathered.get(launch)];
  for (int i = 0; i < boxes.num; ++i) {
    ptx::cp_async_bulk_tensor_3d_shared_global(smem.b[stage] + i * 64 * 128, map, &smem.stage_full[stage],
                                               column + i * 64, step.row, place.slice);
  }
}

// Returns when a step's rows are here.
__device__ __forceinline__ void wait_rows(const RankLaunch& launch, const WgradParams& params,
                                          const WgradStep& step) {
  constexpr int CHUNK_ROWS = WgradOrder::STEP_ROWS;
  const int first = max(step.row, 0);
  const int last = min(step.row + WgradOrder::STEP_ROWS, rows_of(params, step.source)) - 1;
  if (first > last) return;
  for (int chunk = first / CHUNK_ROWS; chunk <= last / CHUNK_ROWS; ++chunk) {
    launch.wait_flag(params.schedule.flag(step.source, chunk), DeviceRole::compute, DeviceObject::chunk,
                     step.source, chunk);
  }
  ptx::fence_proxy_async_global();
}

template <class Config, class Params>
__device__ __forceinline__ void produce_wgrad(const RankLaunch& launch, MainloopStorage<Config>& smem,
                                              const Params& params) {
  static_assert(Config::BLOCK_K == WgradOrder::STEP_ROWS);
  ptx::prefetch_tensormap(&params.load.map_a);
  ptx::prefetch_tensormap(&params.load.map_b);
  for (int bank = 0; bank < MAP_OF_OUTPUT; ++bank) ptx::prefetch_tensormap(&params.map_gathered[bank]);
  TileCursor tiles(params.tiles, blockIdx.x);
  StageCursor<Config::NUM_STAGES> stages;
  TileWork work;
  GatheredMap gathered;
  int num_known = params.wgrad_order.source_steps;  // steps, from the first on, whose rows have been waited for
  while (tiles.next(&work)) {
    const Tracer tracer(params.comm.trace, TRACE_LOAD);
    tracer.begin(TraceKind::load, trace_tile(work));
    const int m = work.m_tile * Config::BLOCK_M, n = work.n_tile * Config::BLOCK_N;
    const StageBoxes a_boxes = a_stage_boxes<Config>(params.load, params.c_rows - m);
    const StageBoxes b_boxes = b_stage_boxes<Config>(params.load, n);
    for (int k_step = work.k_begin; k_step < work.k_end; ++k_step) {
      const WgradStep step = wgrad_step(params, k_step);
      const int stage = stages.stage;
      mbarrier_wait(&smem.stage_empty[stage], stages.phase ^ 1);
      ptx::mbarrier_arrive_expect_tx(&smem.stage_full[stage], a_boxes.bytes() + b_boxes.bytes());
      load_a_stage<Config>(smem, stage, &params.load.map_a, a_boxes, m,
                           step.source * params.max_rows + step.row);
      if (k_step >= num_known) {
        wait_rows(launch, params, step);
        if (k_step == num_known) ++num_known;
      }
      load_x_stage<Config>(launch, smem, stage, params, gathered, step, b_boxes, n);
      stages.advance();
    }
    tracer.end();
  }
}

template <class Config>
__device__ __forceinline__ void consume_wgrad(RankGemmStorage<Config>& smem, const WgradParams& params,
                                              int warpgroup) {
  TileCursor tiles(params.tiles, blockIdx.x);
  consumer_role<Config>(
      smem.mainloop, warpgroup, params.comm.trace, [&](TileWork* work) { return tiles.next(work); },
      [&](const TileWork& work, int block, float(&accumulators)[Config::BLOCK_N / 2]) {
        finish_rows<Config>(params, smem, work, work.m_tile * Config::BLOCK_M, params.c_rows, block,
                            accumulators);
      });
}

template <class Config>
__global__ void __launch_bounds__(Config::NUM_THREADS, 1)
    wgrad_kernel(const __grid_constant__ WgradParams params) {
  extern __shared__ __align__(1024) uint8_t smem_bytes[];
  RankGemmStorage<Config>& smem = *reinterpret_cast<RankGemmStorage<Config>*>(smem_bytes);
  const RankLaunch launch(params.comm);
  launch.begin_cta();
  if (static_cast<int>(blockIdx.x) >= params.tiles.num_workers) {
    if (params.schedule.k > 0) run_push_cta<Config>(launch, params, smem_bytes);
    launch.end_cta();
    return;
  }
  if (threadIdx.x == 0) storage_init(smem);
  __syncthreads();
  run_roles<Config>(
      params.tiles.num_workers, [&] { produce_wgrad<Config>(launch, smem.mainloop, params); },
      [&](const CopyWarp& warp) { run_copy_warp(launch, params, smem.push, nullptr, warp); },
      [&](int warpgroup) { consume_wgrad<Config>(smem, params, warpgroup); });
  launch.end_cta();
}

// dY as [m, k] is a transposed A.
template <GemmTile TILE, class Element, bool DY_TRANSPOSED>
constexpr RankGemmKernel<WgradParams> wgrad_kernel_entry() {
  using Config = GemmConfig<TILE.block_m, TILE.block_n, TILE.ping_pong, Element, !DY_TRANSPOSED, false>;
  static_assert(sizeof(RankGemmStorage<Config>) <= 227 * 1024);
  return {wgrad_kernel<Config>, Config::NUM_THREADS, sizeof(RankGemmStorage<Config>)};
}

template <class Element>
const WgradTable& wgrad_kernel_table() {
  static const WgradTable table = []<size_t... TILES>(std::index_sequence<TILES...>) {
    return WgradTable{{{wgrad_kernel_entry<WGRAD_TILES[TILES], Element, false>(),
                        wgrad_kernel_entry<WGRAD_TILES[TILES], Element, true>()}...}};
  }
  (std::make_index_sequence<NUM_WGRAD_TILES>());
  return table;
}

}  // namespace mk::allgather_gemm
