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

// Tiles of keys in the order of KeyTilesOf's, seen or not. `run` and `position` are not theirs.
template <class Order>
struct PackedKeyTilesOf {
  PackedSlices slices;
  Order order;
  int num_heads;
  int heads_at_once;

  MK_HOST_DEVICE int source(int step) const { return order.source(step, slices.nranks); }
  MK_HOST_DEVICE int tiles_of_step(int step) const { return tiles_of(slices.rows(source(step))); }
  // Of one head.
  MK_HOST_DEVICE int tiles_of_head() const {
    int tiles = 0;
    for (int step = 0; step < slices.nranks; ++step) tiles += tiles_of_step(step);
    return tiles;
  }
  MK_HOST_DEVICE int size() const { return num_heads * tiles_of_head(); }
  MK_HOST_DEVICE KeyTile at(int index) const {
    const KeyTilePlace place = key_tile_place(*this, index);
    KeyTile tile;
    tile.step = place.step;
    tile.head = place.head;
    tile.run = 0;
    tile.index = place.number;
    tile.position = 0;
    tile.num_rows = least(TILE_ROWS, slices.rows(source(place.step)) - place.number * TILE_ROWS);
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

struct PackedQueryBlock : QueryBlock {
  bool is_masked;  // some query does not see all keys of the tile, or one of them is none
  bool sees_tile_before;
};

// As QueryBlockWalk: the blocks of this rank's queries that see something of a tile of keys, at least one row,
// the last first.
class PackedQueryBlockWalk {
 public:
  using Block = PackedQueryBlock;

  MK_HOST_DEVICE PackedQueryBlockWalk(const PackedSlices& slices, int rank, int num_heads, int source,
                                      const RowRange& keys)
      : slices_(slices), rank_(rank), num_heads_(num_heads), source_(source), keys_(keys) {
    const ring_attention::PackedRow first = packed_row(slices, source, keys.begin);
    const ring_attention::PackedRow last = packed_row(slices, source, keys.end - 1);
    see_first_ = slices.seeing_rows(rank, first.sequence, first.position);
    last_begin_ = slices.seeing_rows(rank, last.sequence, last.position).begin;
    begins_sequence_ = slices.row_begin(source, first.sequence) == keys.begin;
    first_ = index_ = blocks_of(slices.rows(rank));
    head_ = num_heads;
  }

  // How many there are: before the first next().
  MK_HOST_DEVICE int count() const {
    PackedQueryBlockWalk stretches(*this);
    int blocks = 0;
    while (stretches.next_stretch()) blocks += stretches.index_ - stretches.first_ + 1;
    return blocks * num_heads_;
  }
  MK_HOST_DEVICE bool next(PackedQueryBlock* block) {
    if (head_ == num_heads_) {
      if (--index_ < first_ && !next_stretch()) return false;
      head_ = 0;
    }
    const int row = index_ * BLOCK_ROWS, end = row + BLOCK_ROWS;
    const bool is_whole = keys_.end - keys_.begin == TILE_ROWS;
    *block = {{head_, 0, index_, row, row, least(BLOCK_ROWS, slices_.rows(rank_) - row)},
              !is_whole || last_begin_ > row || see_first_.end < end,
              !begins_sequence_ && most(row, see_first_.begin) < least(end, see_first_.end)};
    ++head_;
    return true;
  }

 private:
  // Blocks before those that have been taken.
  MK_HOST_DEVICE bool next_stretch() {
    RowRange seeing;
    const int end = least(first_ * BLOCK_ROWS, slices_.rows(rank_));
    if (!last_seeing(slices_, rank_, {0, end}, source_, keys_, &seeing)) return false;
    first_ = seeing.begin / BLOCK_ROWS;
    index_ = blocks_of(seeing.end) - 1;
    return true;
  }

  const PackedSlices& slices_;
  const int rank_;
  const int num_heads_;
  const int source_;
  const RowRange keys_;
  RowRange see_first_;  // queries: those that see the first key
  int last_begin_;      // and where those that see the last one begin
  bool begins_sequence_;
  int head_;
  int first_, index_;  // blocks of the stretch: the last to come, and the one at hand
};

// As KeyTurnsOf, of all tiles of a head, seen or not.
template <class Order>
struct PackedKeyTurnsOf {
  const PackedKeyTilesOf<Order>& tiles;

  MK_HOST_DEVICE KeyTurn of(const KeyTile& tile) const {
    const int nranks = tiles.slices.nranks;
    int turn = tile.index + 1;
    for (int step = tiles.order.first_step(nranks); step != tile.step;
         step = tiles.order.next_step(step, nranks)) {
      turn += tiles.tiles_of_step(step);
    }
    return {turn, {turn - 1, turn - 1}, 0};
  }
  MK_HOST_DEVICE int before(const KeyTile& tile, const KeyTurn& turn, const PackedQueryBlock& block) const {
    return block.sees_tile_before ? turn.number - 1 : last_before(tile.step, tile.index, turn.number, block);
  }
  // That of own keys: the last query sees them up to itself, or to its sequence's end.
  MK_HOST_DEVICE int last(int, const QueryBlock& block) const {
    const PackedSlices& slices = tiles.slices;
    const int own = tiles.order.own(), query = block.row + block.num_rows - 1;
    const int end = slices.causal ? query + 1 : slices.rows_of(own, slices.sequence_of(own, query)).end;
    return tiles.tiles_of_head() - tiles.tiles_of_step(0) + tiles_of(end);
  }

 private:
  // The last turn of those before `turn`, which is that of tile `index` of a step.
  MK_HOST_DEVICE int last_before(int step, int index, int turn, const QueryBlock& block) const {
    const int nranks = tiles.slices.nranks;
    while (true) {
      const int source = tiles.source(step);
      const RowRange keys = {0, least(index * TILE_ROWS, tiles.slices.rows(source))};
      const int key =
          last_seen(tiles.slices, source, keys, tiles.order.own(), {block.row, block.row + block.num_rows});
      if (key >= 0) return turn - index + key / TILE_ROWS;
      if (step == tiles.order.first_step(nranks)) return 0;
      turn -= index;
      step = tiles.order.step_before(step, nranks);
      index = tiles.tiles_of_step(step);
    }
  }
};

template <class Order>
MK_HOST_DEVICE PackedKeyTurnsOf<Order> turns_of(const PackedKeyTilesOf<Order>& tiles) {
  return {tiles};
}

}  // namespace mk::ring_attention_backward
