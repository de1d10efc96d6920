// SPDX-License-Identifier: MIT
// The plain product's kernel: the roles of the mainloop and the epilogue, and nothing else.
#pragma once

#include <cuda.h>

#include <utility>

#include "kernels/device/cluster_tiles.cuh"
#include "kernels/device/ctas_in_step.cuh"
#include "kernels/device/gemm_epilogue.cuh"
#include "kernels/device/gemm_mainloop.cuh"
#include "kernels/device/gemm_partials.cuh"
#include "kernels/device/gemm_roles.cuh"
#include "kernels/device/tensor_stores.cuh"
#include "kernels/device/tile_scheduler.h"
#include "kernels/device/trace.cuh"
#include "kernels/gemm/gemm.h"
#include "kernels/gemm/gemm_plan.h"
#include "kernels/ptx/elect.cuh"
#include "kernels/ptx/grid_dependency.cuh"
#include "kernels/ptx/warp.cuh"

namespace mk {

struct GemmParams {
  LoadParams load;
  CUtensorMap map_c;  // if there is one
  TileSchedule schedule;
  EpilogueParams epilogue;
  int m;  // rows of what is loaded as A
  int num_split_ctas;
  void* workspace;
  GemmTrace trace;
  int tile_columns;  // see gemm_plan_tile_columns(); of kernels with clusters
  bool has_map_c;
  bool prefetches_c;    // whose tiles are added to it soon after they have been asked for
  bool lets_next_come;  // the next grid's CTAs, before all of this one's have ended
};

template <class Config>
struct GemmStorage {
  MainloopStorage<Config> mainloop;
  EpilogueBuffers<Config::BLOCK_M == 256 ? 1 : 2> epilogue[Config::NUM_CONSUMER_WARPS];
};

using GemmKernel = void (*)(GemmParams);

struct GemmKernelEntry {
  GemmKernel kernel;
  int num_threads;
  int smem_bytes;
};

// What a layout is called in the tables: A and B as they come, B transposed, A transposed.
enum GemmLayout { GEMM_KN = 0, GEMM_NK = 1, GEMM_A_TRANSPOSED_KN = 2, NUM_GEMM_LAYOUTS = 3 };

struct GemmKernelTable {
  GemmKernelEntry entries[NUM_GEMM_TILES][NUM_GEMM_LAYOUTS];
};
struct GemmSplitKernelTable {
  GemmKernelEntry entries[NUM_GEMM_SPLIT_TILES][2];  // KN, NK
};
struct GemmPairKernelTable {
  GemmKernelEntry entries[NUM_GEMM_PAIR_TILES][2];  // KN, NK
};
struct GemmSwappedKernelTable {
  GemmKernelEntry entries[NUM_GEMM_SWAPPED_TILES];  // of one layout
};
// One translation unit an input type, so that they compile in parallel. Those that record a trace are kernels
// of their own: the spans' code in the consumers changes how the others' registers are dealt out.
const GemmKernelTable& gemm_kernels_bf16();
const GemmKernelTable& gemm_kernels_fp16();
const GemmKernelTable& gemm_traced_kernels_bf16();
const GemmKernelTable& gemm_traced_kernels_fp16();
const GemmSplitKernelTable& gemm_split_kernels_bf16();
const GemmSplitKernelTable& gemm_split_kernels_fp16();
const GemmPairKernelTable& gemm_pair_kernels_bf16();
const GemmPairKernelTable& gemm_pair_kernels_fp16();
const GemmSwappedKernelTable& gemm_swapped_kernels_bf16_kn();
const GemmSwappedKernelTable& gemm_swapped_kernels_bf16_nk();
const GemmSwappedKernelTable& gemm_swapped_kernels_fp16_kn();
const GemmSwappedKernelTable& gemm_swapped_kernels_fp16_nk();

template <bool TRACED>
__device__ __forceinline__ TraceBuffer* trace_of(const GemmParams& params) {
  if constexpr (TRACED) return params.trace.buffer;
  return nullptr;
}

// One thread loads both operands, large tiles in step with the other CTAs.
template <class Config, bool TRACED>
__device__ __forceinline__ void load_both_operands(GemmStorage<Config>& smem, const GemmParams& params) {
  ptx::prefetch_tensormap(&params.load.map_a);
  ptx::prefetch_tensormap(&params.load.map_b);
  TileCursor tiles(params.schedule, blockIdx.x);
  StageCursor<Config::NUM_STAGES> stages;
  const int num_ctas = params.schedule.num_workers;
  const CtasInStep in_step(PartialsLayout::num_near(params.workspace, num_ctas), num_ctas,
                           Config::IS_LARGE ? params.schedule.near_k_steps : 0);
  ptx::await_previous_grid();
  in_step.begin();
  TileWork work;
  int num_whole = 0;  // of the CTA's tiles; how many pieces of cut ones it has may differ
  while (tiles.next(&work)) {
    const Tracer tracer(trace_of<TRACED>(params), TRACE_LOAD);
    tracer.begin(TraceKind::load, trace_tile(work));
    const bool is_whole = work.k_end - work.k_begin == params.schedule.num_k_steps;
    if (is_whole && num_whole++ > 0) in_step.await_others(num_whole - 1);
    const int m = work.m_tile * Config::BLOCK_M;
    load_tile<Config>(smem.mainloop, stages, params.load, {&params.load.map_a, m, params.m - m}, work,
                      [&](int k_step) {
                        if (is_whole) in_step.at_k_step(k_step, 0, work.k_end);
                      });
    tracer.end();
  }
  if (params.lets_next_come) ptx::let_next_grid_come();
  in_step.leave();
}

// In ping-pong a k-step is so short that one thread does not ask for both fast enough. This is one of two.
template <class Config, bool TRACED, bool IS_A>
__device__ __forceinline__ void load_one_operand(GemmStorage<Config>& smem, const GemmParams& params) {
  ptx::prefetch_tensormap(IS_A ? &params.load.map_a : &params.load.map_b);
  if (IS_A && params.has_map_c) ptx::prefetch_tensormap(&params.map_c);
  ptx::await_previous_grid();
  load_tiles_of_cta<Config, IS_A>(smem.mainloop, params.load, params.m, Config::BLOCK_N, params.schedule,
                                  trace_of<TRACED>(params), [&](const TileWork& work) {
                                    if (IS_A && params.prefetches_c && work.is_owner) {
                                      prefetch_tile_boxes<Config::BLOCK_M, Config::BLOCK_N>(
                                          &params.map_c, params.epilogue.out_type,
                                          work.m_tile * Config::BLOCK_M, work.n_tile * Config::BLOCK_N);
                                    }
                                  });
  if (!IS_A && params.lets_next_come) ptx::let_next_grid_come();
}

template <class Config, bool TRACED>
__device__ __forceinline__ void producer_role(GemmStorage<Config>& smem, const GemmParams& params) {
  const int warp = __shfl_sync(~0u, threadIdx.x % 128 / 32, 0);
  if (warp > (Config::PING_PONG ? 1 : 0) || !ptx::elect_one()) return;
  if constexpr (!Config::PING_PONG) {
    load_both_operands<Config, TRACED>(smem, params);
  } else if (warp == 0) {
    load_one_operand<Config, TRACED, false>(smem, params);
  } else {
    load_one_operand<Config, TRACED, true>(smem, params);
  }
}

// What becomes of a piece's accumulators: a partial tile for its owner, or, with the peers' partial tiles, the
// output. `block`: which 64 rows of the tile; `tiles` walk the tiles of this CTA.
template <class Config, class Tiles, class Deferred>
__device__ __forceinline__ void finish_rows(GemmStorage<Config>& smem, const GemmParams& params,
                                            const Tiles& tiles, const TileWork& work, int block,
                                            float (&accumulators)[Config::BLOCK_N / 2], Deferred& deferred) {
  const int warp = threadIdx.x / 32;
  const int m = work.m_tile * Config::BLOCK_M + block * 64 + warp % 4 * 16;
  const bool has_rows = m < params.m;
  const PartialsLayout partials(gridDim.x, Config::BLOCK_M, Config::BLOCK_N);
  if (!work.is_owner) {
    partials_store(accumulators, partials, params.workspace, blockIdx.x, block, has_rows);
    return;
  }
  if (work.num_peers > 0) {
    partials_add(
        accumulators, partials, params.workspace,
        [&](int peer) { return tiles.cta_of(work.first_peer + peer); }, work.num_peers, block, has_rows);
  }
  const int n = work.n_tile * Config::BLOCK_N;
  if constexpr (Deferred::NUM_PIECES > 0) {
    if (deferred.take(accumulators, params.epilogue, m, params.m, n)) return;
  }
  if constexpr (CAN_STORE_BOXES<Config>) {
    if (params.has_map_c) {
      store_tile_boxes(accumulators, params.epilogue, &params.map_c, smem.epilogue[warp], m, params.m, n);
      return;
    }
  }
  store_tile_rows(accumulators, params.epilogue, smem.epilogue[warp], m, params.m, n);
}

// Where both warpgroups finish a tile together, nothing else would be multiplied while they store it. With two
// blocks of rows each there are no registers for it.
template <class Config>
__device__ __forceinline__ auto deferred_of(GemmStorage<Config>& smem) {
  if constexpr (Config::NUM_CONSUMER_WARPGROUPS == 2 && Config::NUM_ROW_BLOCKS == 1) {
    return DeferredRows<Config::BLOCK_N, 2>(smem.epilogue[threadIdx.x / 32]);
  } else {
    return NothingDeferred();
  }
}

template <class Config, bool TRACED>
__global__ void __launch_bounds__(Config::NUM_THREADS, 1)
    gemm_kernel(const __grid_constant__ GemmParams params) {
  extern __shared__ __align__(1024) uint8_t smem_bytes[];
  GemmStorage<Config>& smem = *reinterpret_cast<GemmStorage<Config>*>(smem_bytes);
  if (threadIdx.x == 0) {
    mainloop_init<Config>(smem.mainloop);
    if constexpr (TRACED) ptx::await_previous_grid();
    trace_enter(trace_of<TRACED>(params), params.trace.epoch, params.trace.op, params.trace.shape);
  }
  __syncthreads();
  if constexpr (Config::IN_CLUSTERS) cluster_meet();  // others write to this one's stages

  // With two consumers the registers of a CTA (168 a thread at launch) are dealt anew: 128 accumulators and
  // their addresses do not fit in 168.
  constexpr bool DEAL_REGISTERS = Config::NUM_CONSUMER_WARPGROUPS > 1;
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (warpgroup == Config::NUM_CONSUMER_WARPGROUPS) {
    if constexpr (DEAL_REGISTERS) ptx::setmaxnreg_dec<40>();
    producer_role<Config, TRACED>(smem, params);
  } else {
    if constexpr (DEAL_REGISTERS) ptx::setmaxnreg_inc<232>();
    ClusterTileCursor<Config, TileSchedule> tiles(params.schedule);
    auto deferred = deferred_of(smem);
    constexpr bool REHEARSES = CAN_REHEARSE<Config> && !TRACED;
    if constexpr (!REHEARSES) ptx::await_previous_grid();
    bool rehearses = REHEARSES;
    const auto next = [&](TileWork* work) {
      if constexpr (REHEARSES) {
        if (rehearses) {
          rehearses = false;
          *work = work_of_no_columns(params.schedule);
          return true;
        }
        ptx::await_previous_grid();
      }
      return tiles.next(work);
    };
    consumer_role<Config, TileWork, TilesAre::plain>(
        smem.mainloop, warpgroup, trace_of<TRACED>(params), next,
        [&](const TileWork& work, int block, float(&accumulators)[Config::BLOCK_N / 2]) {
          finish_rows<Config>(smem, params, tiles, work, block, accumulators, deferred);
        },
        deferred);
    if constexpr (CAN_STORE_BOXES<Config>) await_stored_boxes();
  }

  if constexpr (TRACED) {
    __syncthreads();
    if (threadIdx.x == 0) trace_leave(params.trace.buffer);
  }
}

template <GemmTile TILE, class Element, bool A_TRANSPOSED, bool B_TRANSPOSED, bool TRACED>
constexpr GemmKernelEntry gemm_kernel_entry() {
  using Config =
      GemmConfig<TILE.block_m, TILE.block_n, TILE.ping_pong, Element, A_TRANSPOSED, B_TRANSPOSED, TILE.cluster>;
  static_assert(sizeof(GemmStorage<Config>) <= 227 * 1024);
  static_assert(sizeof(MainloopStorage<Config>) % 1024 == 0);  // boxes of the output are swizzled
  return {gemm_kernel<Config, TRACED>, Config::NUM_THREADS, sizeof(GemmStorage<Config>)};
}

template <class Element, bool TRACED>
const GemmKernelTable& gemm_kernel_table() {
  static const GemmKernelTable table = []<size_t... TILES>(std::index_sequence<TILES...>) {
    return GemmKernelTable{{{gemm_kernel_entry<GEMM_TILES[TILES], Element, false, false, TRACED>(),
                             gemm_kernel_entry<GEMM_TILES[TILES], Element, false, true, TRACED>(),
                             gemm_kernel_entry<GEMM_TILES[TILES], Element, true, false, TRACED>()}...}};
  }
  (std::make_index_sequence<NUM_GEMM_TILES>());
  return table;
}

}  // namespace mk
