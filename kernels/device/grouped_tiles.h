// SPDX-License-Identifier: MIT
// Tiles of a grouped product: rows belong to groups, one after the other, each of which has a B of its own; no
// tile crosses the border of two groups. How many rows each has is known on the device alone.
#pragma once

#include <climits>
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
  int ordinal;  // of the worker's tiles, or parts of them
  // Of a cut tile: the worker that has its last part finishes it. The others, first_peer and every
  // peer_stride-th after it, have its earlier parts, in order.
  bool is_owner;
  int first_peer;
  int num_peers;
  int peer_stride;

  MK_HOST_DEVICE bool is_whole() const { return is_owner && num_peers == 0; }
};

// The last tiles of a walk, where they are at most half as many as workers: each is cut along k into as many
// parts as there are workers for. Neighbours have the same part of neighbouring tiles, as they have these tiles
// whole: what they have in common is then asked for at the same time. Workers wait for workers of a lower index
// alone.
struct CutTiles {
  static constexpr int MAX_PARTS = 8;
  // What it costs to hand over partial sums, in k-steps.
  static constexpr int EXCHANGE_K_STEPS = 12;
  int first_tile = INT_MAX;  // all before it are whole
  int num_tiles = 0;
  int num_parts = 1;

  CutTiles() = default;
  MK_HOST_DEVICE CutTiles(int num_all_tiles, int num_k_steps, int num_workers) {
    const int left = num_all_tiles % num_workers;
    if (left == 0) return;
    const int parts = num_workers / left < MAX_PARTS ? num_workers / left : MAX_PARTS;
    if ((num_k_steps + parts - 1) / parts + EXCHANGE_K_STEPS > num_k_steps) return;
    first_tile = num_all_tiles - left;
    num_tiles = left;
    num_parts = parts;
  }
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
  CutTiles cut = {};  // next() alone knows of them

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
// worker takes every num_workers-th, and then its part of those that are cut, or is told which; whole tiles
// have a higher number than the one before.
template <class Passes>
class GroupedTileCursor {
 public:
  MK_HOST_DEVICE GroupedTileCursor(const GroupedTiles& tiles, const Passes& passes, int worker)
      : tiles_(tiles), passes_(passes), next_tile_(worker) {}

  MK_HOST_DEVICE bool next(GroupedTile* work) {
    if (next_tile_ >= tiles_.cut.first_tile) return take_part(work);
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
    work->is_owner = true;
    work->first_peer = 0;
    work->num_peers = 0;
    work->peer_stride = 0;
    return true;
  }

 private:
  MK_HOST_DEVICE bool take_part(GroupedTile* work) {
    const CutTiles& cut = tiles_.cut;
    const int index = next_tile_ - cut.first_tile;
    const int part = index / cut.num_tiles;
    if (part >= cut.num_parts) return false;
    next_tile_ = INT_MAX;  // it was the worker's last
    const int tile = index - part * cut.num_tiles;
    find(cut.first_tile + tile, work);
    work->k_begin = part * tiles_.num_k_steps / cut.num_parts;
    work->k_end = (part + 1) * tiles_.num_k_steps / cut.num_parts;
    work->is_owner = part + 1 == cut.num_parts;
    if (!work->is_owner) return true;
    work->first_peer = tile;  // a worker's part has its number
    work->num_peers = part;
    work->peer_stride = cut.num_tiles;
    return true;
  }

  const GroupedTiles& tiles_;
  const Passes passes_;
  int next_tile_;
  int group_begin_ = 0;  // the first tile of the group that is in the pass
  int pass_ = 0;
  int group_ = 0;
  int num_tiles_ = 0;
};

}  // namespace mk
