// SPDX-License-Identifier: MIT
// The turns in which tiles of keys add to dQ, inside a node and between nodes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <tuple>
#include <vector>

#include "kernels/ops/ring_attention_backward/cuda_blocks.h"
#include "test/support/catch.h"

namespace mk::test {

// A tile's turns with blocks, in the order of its walk: a key head, a run and a block, the turn before, its
// own.
struct BlockTurn {
  std::tuple<int, int, int> block;
  int before;
  int own;
};

// A turn before is also told for the blocks behind that have it in common.
template <class Turns, class Walk>
std::vector<BlockTurn> turns_of_tile(const Turns& turns, const ring_attention_backward::KeyTile& tile,
                                     Walk walk) {
  using namespace ring_attention_backward;
  const KeyTurn turn = turns.of(tile);
  std::vector<BlockTurn> all;
  for (QueryStretch stretch; walk.next(&stretch);) {
    for (int index = stretch.last; index >= stretch.first;) {
      const TurnBefore before = turns.before(tile, turn, walk, stretch, index);
      REQUIRE((stretch.first <= before.first && before.first <= index));
      for (; index >= before.first; --index)
        all.push_back({{tile.head, stretch.run, index}, before.number, Turns::own(turn, before.number)});
    }
  }
  return all;
}

// Takes the turns of tiles that so many CTAs compute, in the order in which they are handed out: with each
// block one waits for the turn before, and nobody is passed over. The last turn of each block; none, if all
// wait. `num_waits`: how often a tile waited while others went on by a block.
inline std::map<std::tuple<int, int, int>, int> take_turns(const std::vector<std::vector<BlockTurn>>& tiles,
                                                           int num_ctas, int64_t* num_waits = nullptr) {
  struct Cta {
    size_t tile;
    size_t place;
  };
  std::map<std::tuple<int, int, int>, int> last;
  std::vector<Cta> ctas;
  size_t next = 0;
  while (true) {
    std::erase_if(ctas, [&](const Cta& cta) { return cta.place == tiles[cta.tile].size(); });
    while (static_cast<int>(ctas.size()) < num_ctas && next < tiles.size()) {
      if (!tiles[next].empty()) ctas.push_back({next, 0});
      ++next;
    }
    if (ctas.empty()) return last;
    // All at a time: none takes a turn for which another one of these must go on first.
    const auto next_turn = [&](const Cta& cta) -> const BlockTurn& { return tiles[cta.tile][cta.place]; };
    std::vector<Cta*> going;
    for (Cta& cta : ctas) {
      if (last[next_turn(cta).block] == next_turn(cta).before) going.push_back(&cta);
    }
    if (going.empty()) return {};
    if (num_waits != nullptr) *num_waits += static_cast<int64_t>(ctas.size() - going.size());
    for (Cta* cta : going) {
      const BlockTurn& turn = next_turn(*cta);
      REQUIRE(turn.own > turn.before);
      last[turn.block] = turn.own;
      ++cta->place;
    }
  }
}

// One CTA gets through all tiles, and each block's last turn is what rounding it waits for.
template <class Order>
void check_turns(const ring_attention_backward::KeyTilesOf<Order>& tiles, int rank) {
  using namespace ring_attention_backward;
  const auto turns = turns_of(tiles);
  std::vector<std::vector<BlockTurn>> of_tiles;
  for (int number = 0; number < tiles.size(); ++number) {
    const KeyTile tile = tiles.at(number);
    of_tiles.push_back(turns_of_tile(turns, tile, QueryBlockWalk(tiles.slices, rank, tile.position)));
  }
  auto last = take_turns(of_tiles, 1);
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
