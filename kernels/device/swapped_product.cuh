// SPDX-License-Identifier: MIT
// Products in swapped tiles, one after the other: those of clusters whose CTAs share what they load, or of
// single CTAs. Whole tiles in turn, or cut along k.
#pragma once

#include "kernels/device/deferred_columns.cuh"
#include "kernels/device/gemm_mainloop.cuh"
#include "kernels/device/gemm_partials.cuh"
#include "kernels/device/gemm_roles.cuh"
#include "kernels/device/tile_scheduler.h"

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

struct SwappedProduct {
  const EpilogueParams& epilogue;  // C's
  int num_rows;                    // of C
  int tile_rows;                   // from one tile to the next (gemm_plan_tile_columns())
  PartialsLayout partials;
  void* workspace;
  TraceBuffer* trace;
};

// One thread's part of what a CTA loads: all its tiles' columns of B, which is transposed what map_a has, or
// their rows of A; where A is there before the launch.
template <class Config, bool IS_A, class Schedule>
__device__ __forceinline__ void load_swapped_tiles(MainloopStorage<Config>& smem, const LoadParams& load,
                                                   int num_columns, int tile_rows, const Schedule& schedule,
                                                   TraceBuffer* trace) {
  ClusterTileCursor<Config, Schedule> tiles(schedule);
  StageCursor<Config::NUM_STAGES> stages;
  const Tracer tracer(trace, TRACE_LOAD);
  TileWork work;
  while (tiles.next(&work)) {
    const int first_column = work.m_tile * Config::BLOCK_M;
    if constexpr (!IS_A) tracer.begin(TraceKind::load, trace_tile(work));
    load_operand<Config, IS_A>(smem, stages, load, {&load.map_a, first_column, num_columns - first_column},
                               tile_rows, work);
    if constexpr (!IS_A) tracer.end();
  }
  if constexpr (!IS_A) await_sharing_ctas<Config>(smem, stages);
}

// With two blocks of columns each there are no registers for more than a tile.
template <class Config>
using DeferredColumnsOf =
    std::conditional_t<Config::NUM_ROW_BLOCKS == 1, DeferredColumns<Config::BLOCK_N>, NothingDeferred>;

// What becomes of a piece's accumulators: a partial tile for its owner, or, with the other pieces' partial
// tiles, columns of C. `block`: which 64 of the tile's; `tiles` walk the tiles of this CTA.
template <class Config, class Tiles, class Deferred>
__device__ __forceinline__ void finish_columns(const SwappedProduct& product, const Tiles& tiles,
                                               const TileWork& work, int block,
                                               float (&accumulators)[Config::BLOCK_N / 2], Deferred& deferred) {
  const int column = work.m_tile * Config::BLOCK_M + block * 64 + static_cast<int>(threadIdx.x) / 32 % 4 * 16;
  const bool has_columns = column < product.epilogue.n;
  if (!work.is_owner) {
    partials_store(accumulators, product.partials, product.workspace, blockIdx.x, block, has_columns);
    return;
  }
  if (work.num_peers > 0) {
    partials_add(
        accumulators, product.partials, product.workspace,
        [&](int peer) { return tiles.cta_of(work.first_peer + peer); }, work.num_peers, block, has_columns);
  }
  const int row = work.n_tile * product.tile_rows;
  const int row_end = min(product.num_rows, row + product.tile_rows);
  if constexpr (Deferred::NUM_PIECES > 0) {
    if (deferred.take(accumulators, product.epilogue, row, row_end, column)) return;
  }
  store_tile_columns(accumulators, product.epilogue, row, row_end, column);
}

// A consumer warpgroup.
template <class Config, class Schedule>
__device__ __forceinline__ void consume_swapped(MainloopStorage<Config>& smem, const SwappedProduct& product,
                                                const Schedule& schedule, int warpgroup) {
  ClusterTileCursor<Config, Schedule> tiles(schedule);
  DeferredColumnsOf<Config> deferred;
  consumer_role<Config>(
      smem, warpgroup, product.trace, [&](TileWork* work) { return tiles.next(work); },
      [&](const TileWork& work, int block, float(&accumulators)[Config::BLOCK_N / 2]) {
        finish_columns<Config>(product, tiles, work, block, accumulators, deferred);
      },
      deferred);
}

}  // namespace mk
