// SPDX-License-Identifier: MIT
// The turns in which tiles of keys add to dQ, inside a node and between nodes.
#pragma once

#include <algorithm>
#include <map>
#include <tuple>

#include "kernels/ops/ring_attention_backward/cuda_blocks.h"
#include "test/support/catch.h"

namespace mk::test {

// Of one tile: each block's turn before, which is also told for the blocks behind that have it in common, is
// the last that the block has had. `last`: of each key head, run and block.
template <class Turns, class Walk>
void take_turns(const Turns& turns, const ring_attention_backward::KeyTile& tile, Walk walk,
                std::map<std::tuple<int, int, int>, int>* last) {
  using namespace ring_attention_backward;
  const KeyTurn turn = turns.of(tile);
  for (QueryStretch stretch; walk.next(&stretch);) {
    for (int index = stretch.last; index >= stretch.first;) {
      const TurnBefore before = turns.before(tile, turn, walk, stretch, index);
      REQUIRE((stretch.first <= before.first && before.first <= index));
      for (; index >= before.first; --index) {
        int& had = (*last)[{tile.head, stretch.run, index}];
        REQUIRE(before.number == had);
        REQUIRE(turn.number > had);
        had = turn.number;
      }
    }
  }
}

// In the order in which tiles are handed out nobody waits for one that comes later, and nobody is passed over.
template <class Order>
void check_turns(const ring_attention_backward::KeyTilesOf<Order>& tiles, int rank) {
  using namespace ring_attention_backward;
  const auto turns = turns_of(tiles);
  std::map<std::tuple<int, int, int>, int> last;
  for (int number = 0; number < tiles.size(); ++number) {
    const KeyTile tile = tiles.at(number);
    take_turns(turns, tile, QueryBlockWalk(tiles.slices, rank, tile.position), &last);
  }
  for (int run = 0; run < tiles.slices.num_runs(); ++run) {
    const int count = tiles.slices.count(rank, run);
    for (int block = 0; block * BLOCK_ROWS < count; ++block) {
      const int from = block * BLOCK_ROWS;
      const QueryBlock queries = {0,
                                  run,
                                  block,
                                  tiles.slices.first_row(rank, run) + from,
                                  tiles.slices.begin(rank, run) + from,
                                  std::min(BLOCK_ROWS, count - from)};
      for (int head = 0; head < tiles.num_heads; ++head) {
        REQUIRE(last.count({head, run, block}) == 1);
        REQUIRE(turns.last(head, queries) == (last[{head, run, block}]));
      }
    }
  }
}

}  // namespace mk::test
