// SPDX-License-Identifier: MIT
// Products in swapped tiles, one after the other: those of clusters whose CTAs share what they load, or of
// single CTAs. Whole tiles in turn, or cut along k.
#pragma once

#include "kernels/device/cluster_tiles.cuh"
#include "kernels/device/deferred_columns.cuh"
#include "kernels/device/gemm_mainloop.cuh"
#include "kernels/device/gemm_partials.cuh"
#include "kernels/device/gemm_roles.cuh"
#include "kernels/device/tile_scheduler.h"

namespace mk {

struct SwappedProduct {
  const EpilogueParams& epilogue;  // C's
  int num_rows;                    // of C
  int tile_rows;                   // from one tile to the next (gemm_plan_tile_columns())
  PartialsLayout partials;
  void* workspace;
  TraceBuffer* trace;
};

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
