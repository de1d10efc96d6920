// SPDX-License-Identifier: MIT
// The order in which a reduction's tiles are computed: in rounds, in each of which every owner has a block of
// its tiles computed, one owner after the other. An owner's tiles are so finished, and travel, all the time,
// and not all in the end. Host and device.
#pragma once

#include <cstdint>

#include "kernels/device/divisor.h"
#include "kernels/device/tile_scheduler.h"
#include "kernels/protocol.h"

namespace mk::gemm_reduce_scatter {

// A tile of the owner whose turn is the `position`-th of a round.
struct OwnerTile {
  int position;
  int row;  // in tiles, of the owner's
  int column;
};

struct OwnerTiles {
  int num_owners = 0;
  int tile_rows = 0;    // of an owner, at most
  int num_n_tiles = 0;  // of an owner, at most
  int block_rows = 1;
  int block_columns = 1;
  // Rows of a block that are walked by columns, before its next rows: those in flight together form nearly a
  // square.
  int group_rows = 1;

  OwnerTiles() = default;
  OwnerTiles(int owners, int rows, int columns, int rows_of_block, int columns_of_block, int rows_of_group)
      : num_owners(owners),
        tile_rows(rows),
        num_n_tiles(columns),
        block_rows(rows_of_block),
        block_columns(columns_of_block),
        group_rows(rows_of_group < rows_of_block ? rows_of_group : rows_of_block),
        tiles_of_band_(owners * block_rows * num_n_tiles),
        tiles_of_round_(owners * block_rows * block_columns),
        tiles_of_owners_band_(block_rows * num_n_tiles),
        tiles_of_block_(block_rows * block_columns),
        tiles_of_group_(group_rows * block_columns),
        rows_of_group_(group_rows) {}

  MK_HOST_DEVICE int tiles_of_owner() const { return tile_rows * num_n_tiles; }
  MK_HOST_DEVICE int size() const { return num_owners * tiles_of_owner(); }

  MK_HOST_DEVICE OwnerTile at(int number) const {
    return at(number, num_owners, tiles_of_band_, tiles_of_round_);
  }
  // The same of one owner's tiles alone.
  MK_HOST_DEVICE OwnerTile of_owner(int number) const {
    return at(number, 1, tiles_of_owners_band_, tiles_of_block_);
  }
  // Rows of tiles counted as if owners followed one another, tile_rows each.
  MK_HOST_DEVICE int m_tile(const OwnerTile& tile) const { return tile.position * tile_rows + tile.row; }
  // What a worker computes after tile `number`: every `num_workers`-th is its own.
  MK_HOST_DEVICE int after(int number, int num_workers) const { return number + num_workers; }

 private:
  // Blocks and groups at the edges are smaller, and divided by in earnest.
  MK_HOST_DEVICE OwnerTile at(int number, int owners, const Divisor& tiles_of_band,
                              const Divisor& tiles_of_round) const {
    // Rounds of the same rows, then rounds of these that go as far across.
    const int band = number / tiles_of_band;
    number -= band * owners * block_rows * num_n_tiles;
    const int first_row = band * block_rows;
    const int rows = static_cast<int>(min_of(block_rows, tile_rows - first_row));
    const int round = rows == block_rows ? number / tiles_of_round : number / (owners * rows * block_columns);
    number -= round * owners * rows * block_columns;
    const int first_column = round * block_columns;
    const int columns = static_cast<int>(min_of(block_columns, num_n_tiles - first_column));
    const bool is_whole = rows == block_rows && columns == block_columns;
    const int position = is_whole ? number / tiles_of_block_ : number / (rows * columns);
    number -= position * rows * columns;
    const int group = columns == block_columns ? number / tiles_of_group_ : number / (group_rows * columns);
    number -= group * group_rows * columns;
    const int rows_of_group = static_cast<int>(min_of(group_rows, rows - group * group_rows));
    const int across = rows_of_group == group_rows ? number / rows_of_group_ : number / rows_of_group;
    return {position, first_row + group * group_rows + number - across * rows_of_group, first_column + across};
  }

  Divisor tiles_of_band_;
  Divisor tiles_of_round_;
  Divisor tiles_of_owners_band_;
  Divisor tiles_of_block_;
  Divisor tiles_of_group_;
  Divisor rows_of_group_;
};

// A worker's tiles of an order. Producer, consumers and push warps walk alike.
template <class Tiles = OwnerTiles>
class OwnerTileCursor {
 public:
  MK_HOST_DEVICE OwnerTileCursor(const Tiles& tiles, int num_k_steps, int worker, int num_workers)
      : tiles_(tiles), num_k_steps_(num_k_steps), num_workers_(num_workers), next_(worker) {}

  // Passes over tiles of which has_tile(OwnerTile) is false, as owners with fewer do not have them. `work`
  // counts rows of tiles as m_tile() does, and columns within the owner's. A last tile behind which others are
  // passed over is not called so.
  template <class HasTile>
  MK_HOST_DEVICE bool next(TileWork* work, HasTile&& has_tile) {
    while (next_ < tiles_.size()) {
      const OwnerTile tile = tiles_.at(next_);
      next_ = tiles_.after(next_, num_workers_);
      if (!has_tile(tile)) continue;
      const bool is_last = next_ >= tiles_.size();
      *work = {tiles_.m_tile(tile), tile.column, 0, num_k_steps_, 0, 0, true, num_tiles_++, is_last};
      return true;
    }
    return false;
  }

 private:
  const Tiles& tiles_;
  const int num_k_steps_;
  const int num_workers_;
  int next_;
  int num_tiles_ = 0;
};

}  // namespace mk::gemm_reduce_scatter
