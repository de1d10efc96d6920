// SPDX-License-Identifier: MIT
// The consumer warpgroups' part of a persistent product, whatever becomes of the tiles.
#pragma once

#include "kernels/device/deferred_rows.cuh"
#include "kernels/device/gemm_mainloop.cuh"
#include "kernels/device/trace.cuh"
#include "kernels/ptx/warp.cuh"

namespace mk {

// Named barriers: 0 is the CTA's, 1 to 3 the warpgroups' (warpgroup_sync), then the turns of ping-pong.
// Warpgroups take turns because one may not look at its first stage's barrier before the other has seen its
// last stage arrive: a barrier tells a phase from the next, but not from the next but one.
constexpr int TURN_BARRIER = 4;

// `next(&work)` walks the CTA's tiles, false after the last; the producer must walk the same.
// `finish(work, block, accumulators)` takes the warpgroup's `block`-th 64 rows of a tile. If it has a give(),
// that takes all of them before, for what others are to have.
template <class Config, class Work = TileWork, TilesAre TILES = TilesAre::settled, class Next, class Finish,
          class Deferred>
__device__ __forceinline__ void consumer_role(MainloopStorage<Config>& smem, int warpgroup, TraceBuffer* trace,
                                              Next&& next_of, Finish&& finish, Deferred& deferred) {
  StageCursor<Config::NUM_STAGES> stages;
  typename Config::Accumulators accumulators;
  // Shows the compiler that a warp's threads have the walk alike and are together, so that it keeps stages and
  // descriptors in uniform registers (see store_tile_rows()): numbers that came through memory or a long walk
  // are shuffled, and, `settled`, of a fence that only a whole warp may execute it infers that the warp is
  // whole. For that it may lack registers; then `alike`, where a tile is found, does as well. What it has
  // understood shows in the code alone: R2UR between HGMMA (tools/mainloop_sass.py).
  const auto next = [&](Work* work) {
    const bool has_work = next_of(work);
    if constexpr (TILES != TilesAre::alike) return has_work;
    work->k_begin = __shfl_sync(~0u, work->k_begin, 0);
    work->k_end = __shfl_sync(~0u, work->k_end, 0);
    return __any_sync(~0u, has_work) != 0;
  };
  const int first_block = Config::PING_PONG ? 0 : warpgroup * Config::NUM_ROW_BLOCKS;
  const auto end_turn = [&] {
    // With a number that is worked out the compiler keeps descriptors in vector registers.
    if (warpgroup == 0) {
      ptx::barrier_arrive(TURN_BARRIER + 1, 256);
    } else {
      ptx::barrier_arrive(TURN_BARRIER, 256);
    }
  };
  // Ping-pong: leaves `work`, which is the other warpgroup's, and its stages, and moves on to the tile after
  // it.
  const auto skip_tile = [&](Work* work) {
    stages.advance(work->k_end - work->k_begin);
    return next(work);
  };
  Work work;
  bool has_work = next(&work);
  if constexpr (Config::PING_PONG) {
    if (warpgroup == 1) {
      end_turn();
      has_work = has_work && skip_tile(&work);
    }
  }
  const auto settle = [&] {
    if constexpr (TILES != TilesAre::settled) return has_work;
    work.k_begin = __shfl_sync(~0u, work.k_begin, 0);
    work.k_end = __shfl_sync(~0u, work.k_end, 0);
    stages.stage = __shfl_sync(~0u, stages.stage, 0);
    stages.phase = __shfl_sync(~0u, stages.phase, 0);
    ptx::wgmma_fence();
    return __any_sync(~0u, has_work) != 0;
  };
  while (settle()) {
    if constexpr (Config::PING_PONG) ptx::barrier_sync(TURN_BARRIER + warpgroup, 256);
    const Tracer tracer(trace, TRACE_COMPUTE + warpgroup);
    tracer.begin(TraceKind::compute, trace_tile(work));
    Work next_work;
    bool has_next = false;
    const auto on_last_issued = [&] {
      if constexpr (Config::PING_PONG) end_turn();
      // Finding the next tile takes 700 cycles of divisions, here hidden by the last products.
      has_next = next(&next_work);
    };
    multiply_tile<Config>(accumulators, smem, stages, work.k_end - work.k_begin, first_block, on_last_issued,
                          deferred);
    if constexpr (Config::PING_PONG) has_next = has_next && skip_tile(&next_work);
    tracer.end();
    tracer.begin(TraceKind::store, trace_tile(work));
    if constexpr (requires { finish.give(work, 0, accumulators[0]); }) {
#pragma unroll
      for (int block = 0; block < Config::NUM_ROW_BLOCKS; ++block) {
        finish.give(work, first_block + block, accumulators[block]);
      }
    }
#pragma unroll
    for (int block = 0; block < Config::NUM_ROW_BLOCKS; ++block) {
      finish(work, first_block + block, accumulators[block]);
    }
    tracer.end();
    work = next_work;
    has_work = has_next;
  }
  deferred.flush();
}

template <class Config, class Work = TileWork, TilesAre TILES = TilesAre::settled, class Next, class Finish>
__device__ __forceinline__ void consumer_role(MainloopStorage<Config>& smem, int warpgroup, TraceBuffer* trace,
                                              Next&& next, Finish&& finish) {
  NothingDeferred nothing;
  consumer_role<Config, Work, TILES>(smem, warpgroup, trace, next, finish, nothing);
}

}  // namespace mk
