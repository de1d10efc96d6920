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

// The order in which ranks' rows of tiles, `tile_rows` for each, follow one another: the first rank's, then
// either those of the `num_in_turn` others in turn, or, with none of them, all of one rank's after the other's.
struct RankTileOrder {
  int tile_rows = 1;
  int num_in_turn = 0;

  RankTileOrder() = default;
  RankTileOrder(int rows_of_tiles, int ranks_in_turn)
      : tile_rows(rows_of_tiles),
        num_in_turn(ranks_in_turn),
        tile_rows_(tile_rows),
        ranks_in_turn_(num_in_turn) {}

  MK_HOST_DEVICE RankTile place(const TileWork& work) const {
    if (num_in_turn == 0) {
      const int position = work.m_tile / tile_rows_;
      return {position, work.m_tile - position * tile_rows};
    }
    if (work.m_tile < tile_rows) return {0, work.m_tile};
    const int others = work.m_tile - tile_rows;
    const int index = others / ranks_in_turn_;
    return {1 + others - index * num_in_turn, index};
  }

 private:
  Divisor tile_rows_;
  Divisor ranks_in_turn_;
};

// The same between nodes: the first rank's, then those of the `num_near` next ones in turn, then those of the
// `num_far` after them in turn.
struct NearFarTileOrder {
  int tile_rows = 1;
  int num_near = 0;
  int num_far = 0;

  NearFarTileOrder() = default;
  NearFarTileOrder(int rows_of_tiles, int near, int far)
      : tile_rows(rows_of_tiles), num_near(near), num_far(far), tile_rows_(tile_rows), near_(near), far_(far) {}

  MK_HOST_DEVICE RankTile place(const TileWork& work) const {
    if (num_near + num_far == 0) {
      const int position = work.m_tile / tile_rows_;
      return {position, work.m_tile - position * tile_rows};
    }
    if (work.m_tile < tile_rows) return {0, work.m_tile};
    const int near = num_near * tile_rows;
    const bool is_near = work.m_tile - tile_rows < near;
    const int others = is_near ? work.m_tile - tile_rows : work.m_tile - tile_rows - near;
    const int index = is_near ? others / near_ : others / far_;
    const int count = is_near ? num_near : num_far;
    return {(is_near ? 1 : 1 + num_near) + others - index * count, index};
  }

 private:
  Divisor tile_rows_;
  Divisor near_;
  Divisor far_;
};

// Walks a TileSchedule of ranks' rows of tiles; tiles that a rank with fewer rows does not have are passed
// over. Producer and consumers walk alike.
template <class Order, class Schedule = TileSchedule>
class RankTileCursor {
 public:
  MK_HOST_DEVICE RankTileCursor(const Schedule& schedule, int worker, const Order& order)
      : cursor_(schedule, worker), order_(order) {}

  // rows_of(position): rows of the rank at that place.
  template <class RowsOf>
  MK_HOST_DEVICE bool next(TileWork* work, int block_m, RowsOf&& rows_of) {
    while (cursor_.next(work)) {
      const RankTile tile = order_.place(*work);
      if (int64_t{tile.index} * block_m < rows_of(tile.position)) {
        work->ordinal = num_tiles_++;
        return true;
      }
    }
    return false;
  }

 private:
  TileCursor<Schedule> cursor_;
  const Order order_;
  int num_tiles_ = 0;
};

}  // namespace mk
