// SPDX-License-Identifier: MIT
// The order in which a reduction's tiles are computed: in rounds, in each of which every owner has a block of
// its tiles computed, one owner after the other. An owner's tiles are so finished, and travel, all the time,
// and not all in the end. Host and device.
#pragma once

#include <cstdint>

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
  int num_owners;
  int tile_rows;    // of an owner, at most
  int num_n_tiles;  // of an owner, at most
  int block_rows;
  int block_columns;
  // Rows of a block that are walked by columns, before its next rows: those in flight together form nearly a
  // square.
  int group_rows;

  MK_HOST_DEVICE int tiles_of_owner() const { return tile_rows * num_n_tiles; }
  MK_HOST_DEVICE int size() const { return num_owners * tiles_of_owner(); }

  MK_HOST_DEVICE OwnerTile at(int number) const {
    // Rounds of the same rows, then rounds of these that go as far across.
    const int band = number / (num_owners * block_rows * num_n_tiles);
    number -= band * num_owners * block_rows * num_n_tiles;
    const int first_row = band * block_rows;
    const int rows = static_cast<int>(min_of(block_rows, tile_rows - first_row));
    const int round = number / (num_owners * rows * block_columns);
    number -= round * num_owners * rows * block_columns;
    const int first_column = round * block_columns;
    const int columns = static_cast<int>(min_of(block_columns, num_n_tiles - first_column));
    const int position = number / (rows * columns);
    number -= position * rows * columns;
    const int group = number / (group_rows * columns);
    number -= group * group_rows * columns;
    const int rows_of_group = static_cast<int>(min_of(group_rows, rows - group * group_rows));
    const int across = number / rows_of_group;
    return {position, first_row + group * group_rows + number - across * rows_of_group, first_column + across};
  }
  // The same of one owner's tiles alone.
  MK_HOST_DEVICE OwnerTile of_owner(int number) const {
    return OwnerTiles{1, tile_rows, num_n_tiles, block_rows, block_columns, group_rows}.at(number);
  }
  // Rows of tiles counted as if owners followed one another, tile_rows each.
  MK_HOST_DEVICE int m_tile(const OwnerTile& tile) const { return tile.position * tile_rows + tile.row; }
  // What a worker computes after tile `number`: every `num_workers`-th is its own.
  MK_HOST_DEVICE int after(int number, int num_workers) const { return number + num_workers; }
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
