// SPDX-License-Identifier: MIT
// The tiles that a CTA has one after the other, alone or in a cluster whose CTAs share what they load.
#pragma once

#include "kernels/device/gemm_mainloop.cuh"
#include "kernels/device/tile_scheduler.h"
#include "kernels/device/trace.cuh"

namespace mk {

// A CTA's walk. The schedule's workers are the clusters; of the tiles of each piece of work this CTA has the
// one in its place.
template <class Config, class Schedule>
class ClusterTileCursor {
 public:
  __device__ __forceinline__ explicit ClusterTileCursor(const Schedule& schedule)
      : tiles_(schedule, static_cast<int>(blockIdx.x) / Config::NUM_SHARING_CTAS),
        place_(static_cast<int>(blockIdx.x) % Config::NUM_SHARING_CTAS) {}

  __device__ __forceinline__ bool next(TileWork* work) {
    if (!tiles_.next(work)) return false;
    int& tile = Config::CLUSTER.n > 1 ? work->n_tile : work->m_tile;
    tile = tile * Config::NUM_SHARING_CTAS + place_;
    return true;
  }
  // A worker's CTA that is in the same place.
  __device__ int cta_of(int worker) const { return worker * Config::NUM_SHARING_CTAS + place_; }

 private:
  TileCursor<Schedule> tiles_;
  int place_;
};

// One thread's part of what a CTA loads, where A is there before the launch: one operand of all its tiles, of
// which there are `num_rows` rows, and `tile_columns` columns each. One thread for both would be what small
// tiles wait for.
// `on_loaded(work)` is called when all of a tile has been asked for.
template <class Config, bool IS_A, class Schedule, class OnLoaded>
__device__ __forceinline__ void load_tiles_of_cta(MainloopStorage<Config>& smem, const LoadParams& load,
                                                  int num_rows, int tile_columns, const Schedule& schedule,
                                                  TraceBuffer* trace, OnLoaded&& on_loaded) {
  ClusterTileCursor<Config, Schedule> tiles(schedule);
  StageCursor<Config::NUM_STAGES> stages;
  const Tracer tracer(trace, TRACE_LOAD);
  TileWork work;
  while (tiles.next(&work)) {
    const int first_row = work.m_tile * Config::BLOCK_M;
    if constexpr (!IS_A) tracer.begin(TraceKind::load, trace_tile(work));
    load_operand<Config, IS_A>(smem, stages, load, {&load.map_a, first_row, num_rows - first_row}, tile_columns,
                               work);
    if constexpr (!IS_A) tracer.end();
    on_loaded(work);
  }
  if constexpr (!IS_A) await_sharing_ctas<Config>(smem, stages);
}

template <class Config, bool IS_A, class Schedule>
__device__ __forceinline__ void load_tiles_of_cta(MainloopStorage<Config>& smem, const LoadParams& load,
                                                  int num_rows, int tile_columns, const Schedule& schedule,
                                                  TraceBuffer* trace) {
  load_tiles_of_cta<Config, IS_A>(smem, load, num_rows, tile_columns, schedule, trace, [](const TileWork&) {});
}

}  // namespace mk
