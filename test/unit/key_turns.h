// SPDX-License-Identifier: MIT
// The turns in which tiles of keys add to dQ, inside a node and between nodes.
#pragma once

#include <algorithm>
#include <map>
#include <tuple>

#include "kernels/ops/ring_attention_backward/cuda_blocks.h"
#include "test/support/catch.h"

namespace mk::test {

// Each tile finds the turn that it waits for to be the last that the block has had: in the order in which tiles
// are handed out nobody waits for one that comes later, and nobody is passed over. `group`: query heads of a
// key head.
template <class Order>
void check_turns(const ring_attention_backward::KeyTilesOf<Order>& tiles, int rank, int group) {
  using namespace ring_attention_backward;
  const auto turns = turns_of(tiles);
  std::map<std::tuple<int, int, int>, int> last;  // of each query head, run and block
  for (int number = 0; number < tiles.size(); ++number) {
    const KeyTile tile = tiles.at(number);
    const KeyTurn turn = turns.of(tile);
    QueryBlockWalk walk(tiles.slices, rank, group, tile.position);
    for (QueryBlock block; walk.next(&block);) {
      int& had = last[{tile.head * group + block.head, block.run, block.index}];
      REQUIRE(turns.before(tile, turn, block) == had);
      REQUIRE(turn.number > had);
      had = turn.number;
    }
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
      for (int head = 0; head < tiles.num_heads * group; ++head) {
        REQUIRE(last.count({head, run, block}) == 1);
        REQUIRE(turns.last(head / group, queries) == (last[{head, run, block}]));
      }
    }
  }
}

}  // namespace mk::test
