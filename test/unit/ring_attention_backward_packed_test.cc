// SPDX-License-Identifier: MIT
// How the gradients of ring attention over packed sequences are cut up on GPUs, against what schedule.h says of
// positions and of who sees what.
#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <tuple>

#include "../support/catch.h"
#include "kernels/cuda/ring_attention_backward_plan.h"
#include "kernels/ops/ring_attention_backward/packed_blocks.h"
#include "key_turns.h"
#include "packed_cut.h"

using namespace mk;
using namespace mk::ring_attention_backward;
using mk::test::BlockTurn;
using mk::test::PackedCut;
using mk::test::take_turns;
using mk::test::turns_of_tile;

namespace {

PackedKeyTiles tiles_of_rank(const PackedCut& cut, int rank, int num_heads) {
  return {cut.slices, {{rank}}, num_heads, 2};
}

template <class Order>
PackedQueryBlockWalk blocks_of_tile(const PackedKeyTilesOf<Order>& tiles, const KeyTile& tile, int rank) {
  return {tiles.slices, rank, tiles.source(tile.step), PackedKeyTiles::rows_of(tile)};
}

// As of one sequence: in the order in which tiles are handed out each finds the turn that it waits for to be
// the last that the block has had, and behind the last tile every block has had one.
template <class Order>
void check_turns(const PackedCut& cut, const PackedKeyTilesOf<Order>& tiles, int rank) {
  const PackedSlices& slices = cut.slices;
  const auto turns = turns_of(tiles);
  std::vector<std::vector<BlockTurn>> of_tiles;
  for (int number = 0; number < tiles.size(); ++number) {
    const KeyTile tile = tiles.at(number);
    if (tiles.is_seen(tile)) of_tiles.push_back(turns_of_tile(turns, tile, blocks_of_tile(tiles, tile, rank)));
  }
  auto last = take_turns(of_tiles, 1);
  for (int from = 0; from < slices.rows(rank); from += BLOCK_ROWS) {
    const QueryBlock block = {0,    0,    from / BLOCK_ROWS,
                              from, from, std::min(BLOCK_ROWS, slices.rows(rank) - from)};
    for (int head = 0; head < tiles.num_heads; ++head) {
      REQUIRE(last.count({head, 0, block.index}) == 1);
      REQUIRE(turns.last(head, block) == (last[{head, 0, block.index}]));
    }
  }
}

}  // namespace

TEST_CASE("tiles of packed keys are those of all ranks, each once, a rank's own last") {
  std::mt19937_64 random(1);
  for (int round = 0; round < 150; ++round) {
    const PackedCut cut(random, 900);
    const int rank = cut.below(cut.slices.nranks), num_heads = 1 + cut.below(3);
    const PackedKeyTiles tiles = tiles_of_rank(cut, rank, num_heads);
    std::set<std::tuple<int, int, int>> keys;
    int turn = 0;
    for (int index = 0; index < tiles.size(); ++index) {
      const KeyTile tile = tiles.at(index);
      const int source = tiles.source(tile.step);
      REQUIRE((tile.step + cut.slices.nranks - 1) % cut.slices.nranks >= turn);
      turn = (tile.step + cut.slices.nranks - 1) % cut.slices.nranks;
      REQUIRE((tile.num_rows > 0 && tile.num_rows <= TILE_ROWS && tile.run == 0));
      const RowRange rows = PackedKeyTiles::rows_of(tile);
      REQUIRE(rows.end <= cut.slices.rows(source));
      for (int row = rows.begin; row < rows.end; ++row) REQUIRE(keys.emplace(source, tile.head, row).second);
      const bool seen = sees_some(cut.slices, rank, source, rows);
      REQUIRE(seen == cut.sees_some(rank, {0, cut.slices.rows(rank)}, source, rows));
      if (tile.step == 0) REQUIRE(seen);
    }
    REQUIRE(static_cast<int64_t>(keys.size()) == cut.call.seq * num_heads);
  }
}

TEST_CASE("tiles of packed keys are those of some heads in turn") {
  std::mt19937_64 random(5);
  for (int round = 0; round < 50; ++round) {
    const PackedCut cut(random, 2500);
    const int rank = cut.below(cut.slices.nranks);
    const PackedKeyTiles tiles = tiles_of_rank(cut, rank, 5);  // 2, 2, and 1
    int number = 0;
    for (int i = 0; i < cut.slices.nranks; ++i) {
      const int step = (i + 1) % cut.slices.nranks, of_head = tiles.tiles_of_step(step);
      for (int first = 0; first < 5; first += 2) {
        for (int index = 0; index < of_head; ++index) {
          for (int head = first; head < std::min(first + 2, 5); ++head, ++number) {
            const KeyTile tile = tiles.at(number);
            REQUIRE((tile.step == step && tile.head == head && tile.index == index));
          }
        }
      }
    }
    REQUIRE(number == tiles.size());
  }
}

TEST_CASE("a tile of packed keys takes every query that sees one of them once, the last rows first") {
  std::mt19937_64 random(2);
  for (int round = 0; round < 150; ++round) {
    const PackedCut cut(random, 900);
    const PackedSlices& slices = cut.slices;
    const int rank = cut.below(slices.nranks);
    const PackedKeyTiles tiles = tiles_of_rank(cut, rank, 1);
    for (int index = 0; index < tiles.size(); ++index) {
      const KeyTile tile = tiles.at(index);
      const int source = tiles.source(tile.step);
      const RowRange keys = PackedKeyTiles::rows_of(tile);
      if (!sees_some(slices, rank, source, keys)) continue;
      PackedQueryBlockWalk walk = blocks_of_tile(tiles, tile, rank);
      int left = walk.count(), before = INT32_MAX;
      REQUIRE(left > 0);
      std::set<int> taken;
      for (QueryStretch stretch; walk.next(&stretch);) {
        REQUIRE((stretch.run == 0 && stretch.first <= stretch.last));
        for (int number = stretch.last; number >= stretch.first; --number, --left) {
          const PackedQueryBlock block = walk.block(stretch, number);
          REQUIRE((block.index == number && number < before));
          before = number;
          taken.insert(number);
          const RowRange queries = {number * BLOCK_ROWS, (number + 1) * BLOCK_ROWS};
          REQUIRE((block.run == 0 && block.row == queries.begin && block.position == queries.begin));
          REQUIRE(block.num_rows == std::min(BLOCK_ROWS, slices.rows(rank) - block.row));
          REQUIRE(cut.sees_some(rank, queries, source, keys));
          const bool all = block.num_rows == BLOCK_ROWS && tile.num_rows == TILE_ROWS &&
                           cut.sees_all(rank, queries, source, keys);
          REQUIRE(block.is_masked == !all);
        }
      }
      REQUIRE(left == 0);
      for (int block = 0; block * BLOCK_ROWS < slices.rows(rank); ++block) {
        if (cut.sees_some(rank, {block * BLOCK_ROWS, (block + 1) * BLOCK_ROWS}, source, keys))
          REQUIRE(taken.count(block) == 1);
      }
    }
  }
}

TEST_CASE("tiles of packed keys have turns with each block in the order in which they are handed out") {
  std::mt19937_64 random(6);
  for (int round = 0; round < 600; ++round) {
    const PackedCut cut(random, round % 3 == 0 ? 900 : 6000);
    const int nranks = cut.slices.nranks, rank = cut.below(nranks);
    INFO("round " << round << ": rank " << rank << " of " << nranks << ", causal " << cut.call.causal
                  << ", seq " << cut.call.seq << ", " << cut.call.num_sequences << " sequences");
    check_turns(cut, tiles_of_rank(cut, rank, 3), rank);
    // Between nodes.
    uint8_t rank_at[5];
    for (int i = 0; i < nranks; ++i) rank_at[i] = static_cast<uint8_t>((rank + i) % nranks);
    std::shuffle(rank_at + 1, rank_at + nranks, cut.random);
    check_turns(cut, PackedKeyTilesOf<FarRanksFirst>{cut.slices, {{rank_at}}, 2, 2}, rank);
  }
}

TEST_CASE("parts of packed keys are counted by their senders as their owners wait for them") {
  std::mt19937_64 random(3);
  for (int round = 0; round < 150; ++round) {
    const PackedCut cut(random, 2500);
    const int nranks = cut.slices.nranks;
    RingAttentionCall call = cut.call;
    call.op = MK_OPERATOR_RING_ATTENTION_BACKWARD;
    call.kv_heads = 1 + cut.below(3);
    call.heads = 2 * call.kv_heads;
    std::map<std::pair<int, int>, int> sent, expected;  // by owner and flag
    std::map<int, std::set<size_t>> places;             // of an owner
    for (int rank = 0; rank < nranks; ++rank) {
      auto plan = ring_attention_backward_plan(call, rank, nranks, 132);
      REQUIRE(plan.ok());
      const GradientPanels& panels = plan->panels;
      REQUIRE((panels.panel_blocks % TILE_BLOCKS == 0 && panels.num_flags() <= kFlagsPerBank));
      const PackedKeyTiles tiles = tiles_of_rank(cut, rank, panels.num_heads);
      for (int index = 0; index < tiles.size(); ++index) {
        const KeyTile tile = tiles.at(index);
        const int owner = tiles.source(tile.step), step = nranks - tile.step;
        if (tile.step == 0 || !sees_some(cut.slices, rank, owner, PackedKeyTiles::rows_of(tile))) continue;
        const size_t place = panels.part(step, tile.head, 0, tile.index);
        REQUIRE(places[owner].insert(place).second);
        REQUIRE((place >= panels.KeyPanels::area_bytes() &&
                 place + static_cast<size_t>(panels.part_bytes()) <= panels.rows(0, 0, 0)));
        const int flag = panels.part_flag(step, tile.head, 0, tile.index);
        REQUIRE((flag >= panels.KeyPanels::num_flags() && flag < panels.num_flags()));
        ++sent[{owner, flag}];
        const int first = tile.index / panels.panel_tiles() * panels.panel_tiles();
        expected[{owner, flag}] = tiles.seen_among(tile.step, first, panels.panel_tiles());
      }
    }
    REQUIRE(sent == expected);
    for (int owner = 0; owner < nranks; ++owner) {
      auto plan = ring_attention_backward_plan(call, owner, nranks, 132);
      const PackedKeyTiles tiles = tiles_of_rank(cut, owner, plan->panels.num_heads);
      size_t waited = 0;
      for (int index = 0; index < tiles.size(); ++index) {
        const KeyTile tile = tiles.at(index);
        for (int step = 1; step < nranks && tile.step == 0; ++step) {
          if (!sees_some(cut.slices, tiles.source(step), owner, PackedKeyTiles::rows_of(tile))) continue;
          ++waited;
          REQUIRE(places[owner].count(plan->panels.part(step, tile.head, 0, tile.index)) == 1);
          REQUIRE(sent.count({owner, plan->panels.part_flag(step, tile.head, 0, tile.index)}) == 1);
        }
      }
      REQUIRE(waited == places[owner].size());
    }
  }
}

TEST_CASE("an arena for maxima of gradients of packed sequences holds every call within them") {
  RingAttentionCall maxima;
  maxima.op = MK_OPERATOR_RING_ATTENTION_BACKWARD;
  maxima.batch = 2;
  maxima.seq = 1000;
  maxima.heads = 8;
  maxima.kv_heads = 4;
  maxima.dim = 128;
  maxima.num_sequences = 40;
  std::mt19937_64 random(4);
  for (const int nranks : {1, 2, 3, 8}) {
    auto prepared = ring_attention_backward_plan(maxima, 0, nranks, 132);
    REQUIRE(prepared.ok());
    for (int round = 0; round < 300; ++round) {
      RingAttentionCall call = maxima;
      call.num_sequences = static_cast<int>(random() % 41);
      call.batch = call.num_sequences > 0 ? 1 : static_cast<int64_t>(random() % 3);
      call.seq = static_cast<int64_t>(random() % 1001);
      call.kv_heads = 1 << random() % 3;
      call.heads = call.kv_heads << random() % 2;
      call.dim = 8 * (1 + static_cast<int>(random() % 16));
      call.causal = static_cast<mk_causal_t>(random() % 3);
      const auto rank = static_cast<int>(random() % static_cast<uint64_t>(nranks));
      auto plan = ring_attention_backward_plan(call, rank, nranks, 132);
      REQUIRE(plan.ok());
      REQUIRE(plan->area_bytes <= prepared->area_bytes);
      REQUIRE((plan->plan.compute_ctas >= 1 && plan->num_push_ctas <= plan->plan.compute_ctas));
    }
  }
}
