// SPDX-License-Identifier: MIT
// Gradients of one rank's attention without a mask, as cuda_blocks.h has them of any. All tiles of a head are
// computed at the same time, and each begins with the blocks of queries in its own place, from where on it goes
// up, and behind the last on from the first. So at any time they are at different blocks, and none waits for
// another's turn; tiles that begin with the same block begin a turn apart.
//
// With each part of the blocks, as many as a tile has, the tile in whose place they are comes first, then the
// one before it, and so on; behind the first the last. So tiles wait for some that are handed out behind them:
// all CTAs of a launch must come.
#pragma once

#include "kernels/ops/ring_attention_backward/cuda_blocks.h"

namespace mk::ring_attention_backward {

// Handed out head by head: those of the first head that is not done all have been, if there are as many CTAs as
// a head has tiles.
struct CircularKeyTiles {
  int rows;  // of the sequence
  int num_heads;

  MK_HOST_DEVICE int of_head() const { return tiles_of(rows); }
  MK_HOST_DEVICE int64_t size() const { return int64_t{num_heads} * of_head(); }
  MK_HOST_DEVICE KeyTile at(int index) const {
    const int head = index / of_head(), tile = index - head * of_head();
    return {0, head, 0, tile, tile * TILE_ROWS, least(TILE_ROWS, rows - tile * TILE_ROWS)};
  }
  MK_HOST_DEVICE static constexpr bool is_seen(const KeyTile&) { return true; }
};

struct CircularKeyTurns {
  const CircularKeyTiles& tiles;

  MK_HOST_DEVICE KeyTurn of(const KeyTile&) const { return {}; }
  template <class Walk>
  MK_HOST_DEVICE TurnBefore before(const KeyTile& tile, const KeyTurn&, const Walk&, const QueryStretch& part,
                                   int) const {
    const int others = part.first / TILE_BLOCKS - tile.index;
    return {others < 0 ? others + tiles.of_head() : others, part.first};
  }
  MK_HOST_DEVICE static int own(const KeyTurn&, int before) { return before + 1; }
  MK_HOST_DEVICE int last(int, const QueryBlock&) const { return tiles.of_head(); }
};

MK_HOST_DEVICE CircularKeyTurns turns_of(const CircularKeyTiles& tiles) { return {tiles}; }

class CircularQueryWalk {
 public:
  MK_HOST_DEVICE CircularQueryWalk(const CircularKeyTiles& tiles, const KeyTile& tile)
      : rows_(tiles.rows), part_(tile.index), num_left_(tiles.of_head()) {}

  // Before the first next().
  MK_HOST_DEVICE int count() const { return blocks_of(rows_); }
  MK_HOST_DEVICE bool next(QueryStretch* part) {
    if (--num_left_ < 0) return false;
    const int first = part_ * TILE_BLOCKS, last = blocks_of(rows_) - 1;
    *part = {0, first, least(first + TILE_BLOCKS - 1, last)};
    part_ = part->last < last ? part_ + 1 : 0;
    return true;
  }
  MK_HOST_DEVICE QueryBlock block(const QueryStretch&, int index) const {
    const int from = index * BLOCK_ROWS;
    return {0, 0, index, from, from, least(BLOCK_ROWS, rows_ - from)};
  }

 private:
  const int rows_;
  int part_;      // the next
  int num_left_;  // parts
};

}  // namespace mk::ring_attention_backward
