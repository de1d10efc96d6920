// SPDX-License-Identifier: MIT
// AllGather+GEMM in mode WGRAD as one persistent kernel: C = dY^T * gathered X. Rows of X travel as those of A
// do in mode FORWARD; they are the inner dimension, so that each tile takes this rank's first, and then the
// others' as they arrive. Panels are of columns of C: the first tiles' come first, of all rows.
#pragma once

#include "kernels/ops/allgather_gemm/cuda_kernel.cuh"
#include "kernels/ops/allgather_gemm/wgrad_order.h"

namespace mk::allgather_gemm {

// In `load`, map_a is that of dY, and map_b that of this rank's X (WgradMap::own); map_gathered is
// WgradMap::whole.
struct WgradParams : CudaParams {
  CUtensorMap map_last[3];
  WgradOrder wgrad_order;
  ChunkGroups chunk_groups;
  int c_rows;
};

using WgradTable = RankGemmTable<WgradParams, NUM_WGRAD_TILES>;
const WgradTable& wgrad_kernels_bf16();
const WgradTable& wgrad_kernels_fp16();

// 64 rows of X, those of `source` from `row` on.
template <class Config>
__device__ __forceinline__ void load_x_stage(const RankLaunch& launch, MainloopStorage<Config>& smem, int stage,
                                             const WgradParams& params, GatheredMap& gathered, int source,
                                             int row, const StageBoxes& boxes, int column) {
  const WgradPlace place =
      params.merged ? WgradPlace{WgradMap::whole, 0}
                    : wgrad_place(source, params.comm.rank, rows_of(params, source), params.max_rows);
  const CUtensorMap* map = place.map == WgradMap::own     ? &params.load.map_b
                           : place.map == WgradMap::whole ? &params.map_gathered[gathered.get(launch)]
                                                          : &params.map_last[gathered.get(launch)];
  for (int i = 0; i < boxes.num; ++i) {
    ptx::cp_async_bulk_tensor_3d_shared_global(smem.b[stage] + i * 64 * 128, map, &smem.stage_full[stage],
                                               column + i * 64, row, place.slice);
  }
}

// Other ranks' rows of a panel have come, a group of chunks after the other.
struct ChunkBarriers {
  uint64_t here[MAX_PANELS][ChunkGroups::NUM_GROUPS];
};

// By one thread, before a fence.mbarrier_init and a CTA-wide barrier.
__device__ __forceinline__ void chunks_init(ChunkBarriers& chunks) {
  for (auto& panel : chunks.here) {
    for (uint64_t& here : panel) ptx::mbarrier_init(&here, 1);
  }
}

template <class Config>
struct WgradStorage : RankGemmStorage<Config> {
  ChunkBarriers chunks;
};

// By one thread of the CTA, before a CTA-wide barrier.
template <class Config>
__device__ __forceinline__ void wgrad_init(WgradStorage<Config>& smem) {
  chunks_init(smem.chunks);
  storage_init<Config>(smem);
}

template <class Config>
__device__ __forceinline__ int panel_of(const WgradParams& params, const TileWork& work) {
  return work.n_tile * Config::BLOCK_N / (params.panel_steps * 64);
}

// By the copy warp that never pushes, for its CTA: sees the flags of a group's chunks at once, of those panels
// that the CTA's tiles are in, as these follow one another. A flag takes a microsecond, which the producer has
// not.
template <class Config, class Params>
__device__ __forceinline__ void watch_chunks(const RankLaunch& launch, const Params& params,
                                             ChunkBarriers& chunks) {
  const int lane = threadIdx.x % 32;
  TileCursor tiles(tile_schedule(params), blockIdx.x);
  TileWork work;
  uint32_t watched = 0;  // panels, a bit each
  bool goes_on = true;
#pragma unroll 1
  while (watched + 1 != 1u << params.num_panels && tiles.next(&work)) {
    const int panel = panel_of<Config>(params, work);
    if ((watched >> panel & 1) != 0) continue;
    watched |= 1u << panel;
#pragma unroll 1
    for (int group = 0; group < ChunkGroups::NUM_GROUPS; ++group) {
      const ChunkGroups::Range range = params.chunk_groups.range(params.wgrad_order, group);
      const int num_flags = (range.end - range.begin) * range.count;
#pragma unroll 1
      for (int first = 0; first < num_flags && goes_on; first += 32) {
        const int index = min(first + lane, num_flags - 1);
        const int chunk = range.begin + index / range.count;
        const int source = source_at(params, range.position + index % range.count);
        const bool waits = chunk * params.schedule.chunk_rows < rows_of(params, source);
        goes_on = launch.watch_flags(waits, panel_flag(params, source, chunk, panel), DeviceRole::compute,
                                     DeviceObject::chunk, source, chunk);
      }
      if (lane == 0) {
        ptx::fence_proxy_async_global();  // TMA is another proxy than the loads that saw the flags
        ptx::mbarrier_arrive(&chunks.here[panel][group]);
      }
    }
  }
}

template <class Config, class Params>
__device__ __forceinline__ void produce_wgrad(const RankLaunch& launch, WgradStorage<Config>& storage,
                                              const Params& params) {
  MainloopStorage<Config>& smem = storage.mainloop;
  static_assert(Config::BLOCK_K == WgradOrder::STEP_ROWS);
  ptx::prefetch_tensormap(&params.load.map_a);
  ptx::prefetch_tensormap(&params.load.map_b);
  for (int bank = 0; bank < MAP_OF_OUTPUT; ++bank) ptx::prefetch_tensormap(&params.map_gathered[bank]);
  TileCursor tiles(tile_schedule(params), blockIdx.x);
  StageCursor<Config::NUM_STAGES> stages;
  TileWork work;
  GatheredMap gathered;
  const WgradOrder order = params.wgrad_order;
  uint32_t here = 0;  // panels, a bit each, all of whose rows have been waited for
  while (tiles.next(&work)) {
    const Tracer tracer(params.comm.trace, TRACE_LOAD);
    tracer.begin(TraceKind::load, trace_tile(work));
    const int m = work.m_tile * Config::BLOCK_M, n = work.n_tile * Config::BLOCK_N;
    const StageBoxes a_boxes = a_stage_boxes<Config>(params.load, params.c_rows - m);
    const StageBoxes b_boxes = b_stage_boxes<Config>(params.load, n);
    const int panel = panel_of<Config>(params, work);
    int next_wait = (here >> panel & 1) != 0 ? work.k_end : order.first_wait();
    if (work.k_end - work.k_begin == params.tiles.num_k_steps) here |= 1u << panel;  // when this tile has been
    WgradStep step = order.at(work.k_begin);
    for (int k_step = work.k_begin; k_step < work.k_end; ++k_step) {
      const int source = order.merged ? 0 : source_at(params, step.position);
      const int row = order.first_row(source, step.turn);
      const int stage = stages.stage;
      mbarrier_wait(&smem.stage_empty[stage], stages.phase ^ 1);
      ptx::mbarrier_arrive_expect_tx(&smem.stage_full[stage], a_boxes.bytes() + b_boxes.bytes());
      load_a_stage<Config>(smem, stage, &params.load.map_a, a_boxes, m, source * params.max_rows + row);
      if (k_step >= next_wait) {
        const ChunkGroups::Needed needed = params.chunk_groups.needed(order, step);
        mbarrier_wait(&storage.chunks.here[panel][needed.group], 0);
        next_wait = needed.end_step;
      }
      load_x_stage<Config>(launch, smem, stage, params, gathered, source, row, b_boxes, n);
      step = order.after(step);
      stages.advance();
    }
    tracer.end();
  }
}

template <class Config>
__device__ __forceinline__ void consume_wgrad(RankGemmStorage<Config>& smem, const WgradParams& params,
                                              int warpgroup) {
  TileCursor tiles(tile_schedule(params), blockIdx.x);
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
  WgradStorage<Config>& smem = *reinterpret_cast<WgradStorage<Config>*>(smem_bytes);
  const RankLaunch launch(params.comm);
  launch.begin_cta();
  const int num_early = params.tiles.num_workers;
  if (static_cast<int>(blockIdx.x) >= num_early) {
    if (params.schedule.k > 0) run_push_cta<Config>(launch, params, smem_bytes);
    if (params.late_tiles.num_workers == num_early) {
      launch.end_cta();
      return;
    }
    push_cta_end(*reinterpret_cast<PushCtaStorage<Config::NUM_THREADS>*>(smem_bytes));
  }
  if (threadIdx.x == 0) wgrad_init(smem);
  __syncthreads();
  run_roles<Config>(
      num_early, [&] { produce_wgrad<Config>(launch, smem, params); },
      [&](const CopyWarp& warp) {
        run_copy_warp(launch, params, smem.push, nullptr, warp,
                      [&] { watch_chunks<Config>(launch, params, smem.chunks); });
      },
      [&](int warpgroup) __attribute__((always_inline)) { consume_wgrad<Config>(smem, params, warpgroup); });
  launch.end_cta();
}

// dY as [m, k] is a transposed A.
template <GemmTile TILE, class Element, bool DY_TRANSPOSED>
constexpr RankGemmKernel<WgradParams> wgrad_kernel_entry() {
  using Config = GemmConfig<TILE.block_m, TILE.block_n, TILE.ping_pong, Element, !DY_TRANSPOSED, false>;
  static_assert(sizeof(WgradStorage<Config>) <= 227 * 1024);
  return {wgrad_kernel<Config>, Config::NUM_THREADS, sizeof(WgradStorage<Config>)};
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
