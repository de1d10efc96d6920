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
  const PackedSlices& slices;
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
    return tile.step == 0 || sees_some(slices, order.own(), source(tile.step), rows_of(tile));
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
};

// As QueryBlockWalk: the blocks of this rank's queries that see something of a tile of keys, at least one row,
// the last first.
class PackedQueryBlockWalk {
 public:
  MK_HOST_DEVICE PackedQueryBlockWalk(const PackedSlices& slices, int rank, int source, const RowRange& keys)
      : slices_(slices), rank_(rank), source_(source), num_rows_(slices.rows(rank)), keys_(keys) {
    const ring_attention::PackedRow first = packed_row(slices, source, keys.begin);
    const ring_attention::PackedRow last = packed_row(slices, source, keys.end - 1);
    const bool is_whole = keys.end - keys.begin == TILE_ROWS;
    first_sequence_ = first.sequence;
    sequence_ = last.sequence;
    see_first_ = slices.seeing_rows(rank, first.sequence, first.position);
    see_all_from_ = is_whole ? slices.seeing_rows(rank, last.sequence, last.position).begin : num_rows_;
    begins_sequence_ = slices.row_begin(source, first.sequence) == keys.begin;
    const RowRange sequence = slices.rows_of(rank, first.sequence);
    see_none_before_from_ = begins_sequence_ ? sequence.begin : sequence.end;
    end_ = blocks_of(num_rows_);
  }

  // How many there are: before the first next().
  MK_HOST_DEVICE int count() const {
    PackedQueryBlockWalk walk(*this);
    QueryStretch stretch;
    int blocks = 0;
    while (walk.next(&stretch)) blocks += stretch.last - stretch.first + 1;
    return blocks;
  }
  // Sequence after sequence of the keys, of which the first one is seen by most.
  MK_HOST_DEVICE bool next(QueryStretch* stretch) {
    while (sequence_ >= first_sequence_) {
      const int sequence = sequence_--;
      const RowRange all = slices_.rows_of(source_, sequence);
      const int key = most(keys_.begin, all.begin);
      if (key >= least(keys_.end, all.end)) continue;
      const int position = slices_.causal ? slices_.position_of(source_, sequence, key) : 0;
      const RowRange seeing = slices_.seeing_rows(rank_, sequence, position);
      const int end = least(seeing.end, end_ * BLOCK_ROWS);
      if (seeing.begin >= end) continue;
      *stretch = {0, seeing.begin / BLOCK_ROWS, blocks_of(end) - 1};
      end_ = stretch->first;
      return true;
    }
    return false;
  }
  MK_HOST_DEVICE PackedQueryBlock block(const QueryStretch&, int index) const {
    const int row = index * BLOCK_ROWS;
    return {{0, 0, index, row, row, least(BLOCK_ROWS, num_rows_ - row)},
            row < see_all_from_ || row + BLOCK_ROWS > see_first_.end};
  }
  // Blocks that see the tile before of the same source: from `first` to `last`, or none.
  MK_HOST_DEVICE QueryStretch seeing_tile_before() const {
    if (begins_sequence_ || see_first_.begin >= see_first_.end) return {0, 0, -1};
    return {0, see_first_.begin / BLOCK_ROWS, blocks_of(see_first_.end) - 1};
  }
  // From this block on none sees any tile before of the same source, but those of seeing_tile_before().
  MK_HOST_DEVICE int seeing_none_before() const { return blocks_of(see_none_before_from_); }

 private:
  const PackedSlices& slices_;
  const int rank_;
  const int source_;
  const int num_rows_;
  const RowRange keys_;
  RowRange see_first_;        // queries: those that see the first key
  int see_all_from_;          // where those begin that see the last one, if the tile is whole
  int see_none_before_from_;  // where those begin whose sequence has no key before the tile
  bool begins_sequence_;
  int first_sequence_, sequence_;  // of the keys, and the next to come
  int end_;                        // blocks before this one are to come
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
  MK_HOST_DEVICE TurnBefore before(const KeyTile& tile, const KeyTurn& turn, const PackedQueryBlockWalk& walk,
                                   const QueryStretch& stretch, int last) const {
    const QueryStretch seeing = walk.seeing_tile_before();
    if (last >= seeing.first && last <= seeing.last) return {turn.number - 1, stretch.first};
    const int none_from = most(walk.seeing_none_before(), seeing.last + 1);
    if (last >= none_from && tile.step == tiles.order.first_step(tiles.slices.nranks))
      return {0, most(stretch.first, none_from)};
    return {last_before(tile.step, tile.index, turn.number, walk.block(stretch, last)), last};
  }
  MK_HOST_DEVICE static int own(const KeyTurn& turn, int) { return turn.number; }
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
