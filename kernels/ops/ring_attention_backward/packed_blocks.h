// SPDX-License-Identifier: MIT
// Gradients of ring attention over packed sequences on GPUs: as cuda_blocks.h, in rows of a rank as
// ring_attention/packed_blocks.h. Pure, host and device.
#pragma once

#include "kernels/ops/ring_attention/packed_blocks.h"
#include "kernels/ops/ring_attention_backward/cuda_blocks.h"

namespace mk::ring_attention_backward {

using ring_attention::PackedSlices;
using ring_attention::RowRange;

// Does some query of `rank` see one of these rows of `source`?
MK_HOST_DEVICE bool sees_some(const PackedSlices& slices, int rank, int source, const RowRange& keys) {
  RowRange seen;
  return next_seen(slices, source, keys, rank, {0, slices.rows(rank)}, &seen);
}

// Tiles of keys, head by head, in the order of KeyTilesOf's steps, seen or not. `run` and `position` are not
// theirs.
template <class Order>
struct PackedKeyTilesOf {
  PackedSlices slices;
  Order order;
  int num_heads;

  MK_HOST_DEVICE int source(int step) const { return order.source(step, slices.nranks); }
  MK_HOST_DEVICE int tiles_of_step(int step) const { return tiles_of(slices.rows(source(step))); }
  MK_HOST_DEVICE int size() const {
    int tiles = 0;
    for (int step = 0; step < slices.nranks; ++step) tiles += num_heads * tiles_of_step(step);
    return tiles;
  }
  MK_HOST_DEVICE KeyTile at(int index) const {
    int step = order.first_step(slices.nranks), tiles = tiles_of_step(step);
    while (index >= num_heads * tiles && step != 0) {
      index -= num_heads * tiles;
      step = order.next_step(step, slices.nranks);
      tiles = tiles_of_step(step);
    }
    KeyTile tile;
    tile.step = step;
    tile.head = index / tiles;
    tile.index = index - tile.head * tiles;
    tile.run = 0;
    tile.position = 0;
    tile.num_rows = least(TILE_ROWS, slices.rows(source(step)) - tile.index * TILE_ROWS);
    return tile;
  }
  MK_HOST_DEVICE static RowRange rows_of(const KeyTile& tile) {
    return {tile.index * TILE_ROWS, tile.index * TILE_ROWS + tile.num_rows};
  }
  // Does this rank see something of it?
  MK_HOST_DEVICE bool is_seen(const KeyTile& tile) const {
    return sees_some(slices, order.own(), source(tile.step), rows_of(tile));
  }
  // Of the tiles from `first` on, those that are seen.
  MK_HOST_DEVICE int seen_among(int step, int first, int count) const {
    const int owner = source(step), rows = slices.rows(owner);
    int seen = 0;
    for (int index = first; index < least(first + count, tiles_of(rows)); ++index) {
      if (sees_some(slices, order.own(), owner, {index * TILE_ROWS, least((index + 1) * TILE_ROWS, rows)}))
        ++seen;
    }
    return seen;
  }
};
using PackedKeyTiles = PackedKeyTilesOf<NextRanksFirst>;

// Queries of one head.
struct PackedQueryBlock {
  int head;  // 0 for the first of those that share the key head
  int index;
  bool is_masked;  // some query does not see all keys of the tile, or is none
};

// The blocks of this rank's queries that see something of a tile of keys, at least one row: head by head,
// ascending.
class PackedQueryBlockWalk {
 public:
  MK_HOST_DEVICE PackedQueryBlockWalk(const PackedSlices& slices, int rank, int num_heads, int source,
                                      const RowRange& keys)
      : slices_(slices), rank_(rank), num_heads_(num_heads), source_(source), keys_(keys) {
    const ring_attention::PackedRow first = packed_row(slices, source, keys.begin);
    const ring_attention::PackedRow last = packed_row(slices, source, keys.end - 1);
    first_end_ = slices.seeing_rows(rank, first.sequence, first.position).end;
    last_begin_ = slices.seeing_rows(rank, last.sequence, last.position).begin;
  }

  // How many there are: before the first next().
  MK_HOST_DEVICE int count() const {
    PackedQueryBlockWalk stretches(*this);
    int blocks = 0;
    while (stretches.next_stretch()) {
      blocks += stretches.end_ - stretches.index_;
      stretches.index_ = stretches.end_;
    }
    return blocks * num_heads_;
  }
  MK_HOST_DEVICE bool next(PackedQueryBlock* block) {
    while (index_ == end_ && !next_stretch()) {
      if (++head_ >= num_heads_) return false;
      index_ = end_ = 0;
    }
    const int row = index_ * BLOCK_ROWS;
    *block = {head_, index_, last_begin_ > row || first_end_ < row + BLOCK_ROWS};
    ++index_;
    return true;
  }

 private:
  MK_HOST_DEVICE bool next_stretch() {
    RowRange seeing;
    if (!next_seeing(slices_, rank_, {index_ * BLOCK_ROWS, slices_.rows(rank_)}, source_, keys_, &seeing))
      return false;
    index_ = seeing.begin / BLOCK_ROWS;
    end_ = blocks_of(seeing.end);
    return true;
  }

  const PackedSlices& slices_;
  const int rank_;
  const int num_heads_;
  const int source_;
  const RowRange keys_;
  int first_end_, last_begin_;  // rows: where what sees the first key ends, and what sees the last one begins
  int head_ = 0;
  int index_ = 0, end_ = 0;  // blocks: the next, and behind the last of the stretch
};

}  // namespace mk::ring_attention_backward
