// SPDX-License-Identifier: MIT
// Tiles of a product whose rows belong to ranks: no tile crosses a border between two ranks' rows.
#pragma once

#include "kernels/device/tile_scheduler.h"
#include "kernels/protocol.h"

namespace mk {

// A tile's rows: those of the `position`-th rank in the order of the walk, from `row` of its rows on.
struct RankTile {
  int position;
  int index;  // row of tiles within the rank's
};

// Walks a TileSchedule whose rows of tiles are `tile_rows` for each rank; tiles that a rank with fewer rows
// does not have are passed over. Producer and consumers walk alike.
class RankTileCursor {
 public:
  // rows_of(position): rows of the rank at that place.
  MK_HOST_DEVICE RankTileCursor(const TileSchedule& schedule, int worker, int tile_rows)
      : cursor_(schedule, worker), tile_rows_(tile_rows) {}

  MK_HOST_DEVICE static RankTile place(const TileWork& work, int tile_rows) {
    return {work.m_tile / tile_rows, work.m_tile % tile_rows};
  }

  template <class RowsOf>
  MK_HOST_DEVICE bool next(TileWork* work, int block_m, RowsOf&& rows_of) {
    while (cursor_.next(work)) {
      const RankTile tile = place(*work, tile_rows_);
      if (int64_t{tile.index} * block_m < rows_of(tile.position)) {
        work->ordinal = num_tiles_++;
        return true;
      }
    }
    return false;
  }

 private:
  TileCursor cursor_;
  int tile_rows_;
  int num_tiles_ = 0;
};

}  // namespace mk
