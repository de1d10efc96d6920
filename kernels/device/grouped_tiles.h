// SPDX-License-Identifier: MIT
// Tiles of a grouped product: rows belong to groups, one after the other, each of which has a B of its own; no
// tile crosses the border of two groups. How many rows each has is known on the device alone.
#pragma once

#include <cstdint>

#include "kernels/device/host_device.h"
#include "kernels/device/tile_scheduler.h"

namespace mk {

struct GroupedTile {
  int m_tile;  // of its group
  int n_tile;
  int k_begin;  // in k-steps
  int k_end;
  int group;
  int row;      // the tile's first
  int row_end;  // the group's
  int ordinal;  // of the worker's tiles
};

// Group g has the rows [row_begin[g], row_begin[g + 1]) less row_begin[0].
struct GroupedTiles {
  const uint32_t* row_begin;
  int num_groups;
  int block_m;
  int num_n_tiles;
  int num_k_steps;
  int group_m;  // see TileRaster
  int num_workers;

  MK_HOST_DEVICE int first_row(int group) const { return static_cast<int>(row_begin[group] - row_begin[0]); }
  MK_HOST_DEVICE int num_m_tiles(int group) const {
    return (first_row(group + 1) - first_row(group) + block_m - 1) / block_m;
  }
};

// In how many passes over all groups their tiles are walked: in one, or, where a range of each group's tiles
// (along M) has other things to wait for than the rest, in two.
struct OnePass {
  static constexpr int NUM_PASSES = 1;
  MK_HOST_DEVICE int num_m_tiles(int, int, int of_group) const { return of_group; }
  MK_HOST_DEVICE int m_tile(int, int, int index) const { return index; }
};
struct TileRange {
  uint16_t begin;
  uint16_t end;
};
struct TwoPasses {
  static constexpr int NUM_PASSES = 2;
  const TileRange* ranges;  // a group's
  int pass_of_ranges;

  MK_HOST_DEVICE int num_m_tiles(int pass, int group, int of_group) const {
    const int in_range = ranges[group].end - ranges[group].begin;
    return pass == pass_of_ranges ? in_range : of_group - in_range;
  }
  MK_HOST_DEVICE int m_tile(int pass, int group, int index) const {
    const TileRange range = ranges[group];
    if (pass == pass_of_ranges) return range.begin + index;
    return index < range.begin ? index : index + range.end - range.begin;
  }
};

// Tiles are numbered pass by pass, in a pass group by group, inside a group as TileRaster does. A
// worker takes every num_workers-th, or is told which; either way a tile has a higher number than the one
// before.
template <class Passes>
class GroupedTileCursor {
 public:
  MK_HOST_DEVICE GroupedTileCursor(const GroupedTiles& tiles, const Passes& passes, int worker)
      : tiles_(tiles), passes_(passes), next_tile_(worker) {}

  MK_HOST_DEVICE bool next(GroupedTile* work) {
    const bool has_work = find(next_tile_, work);
    next_tile_ += tiles_.num_workers;
    return has_work;
  }
  MK_HOST_DEVICE bool find(int tile, GroupedTile* work) {
    int num_m_tiles = 0;
    while (true) {
      for (; group_ < tiles_.num_groups; ++group_) {
        num_m_tiles = passes_.num_m_tiles(pass_, group_, tiles_.num_m_tiles(group_));
        const int num_tiles = num_m_tiles * tiles_.num_n_tiles;
        if (tile - group_begin_ < num_tiles) break;
        group_begin_ += num_tiles;
      }
      if (group_ < tiles_.num_groups) break;
      if (pass_ + 1 == Passes::NUM_PASSES) return false;
      ++pass_;
      group_ = 0;
    }
    int m_tile = 0;
    TileRaster{num_m_tiles, tiles_.num_n_tiles, tiles_.group_m}.place(tile - group_begin_, &m_tile,
                                                                      &work->n_tile);
    work->m_tile = passes_.m_tile(pass_, group_, m_tile);
    work->k_begin = 0;
    work->k_end = tiles_.num_k_steps;
    work->group = group_;
    work->row = tiles_.first_row(group_) + work->m_tile * tiles_.block_m;
    work->row_end = tiles_.first_row(group_ + 1);
    work->ordinal = num_tiles_++;
    return true;
  }

 private:
  const GroupedTiles& tiles_;
  const Passes passes_;
  int next_tile_;
  int group_begin_ = 0;  // the first tile of the group that is in the pass
  int pass_ = 0;
  int group_ = 0;
  int num_tiles_ = 0;
};

}  // namespace mk
