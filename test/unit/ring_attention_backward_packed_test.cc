// SPDX-License-Identifier: MIT
// How the gradients of ring attention over packed sequences are cut up on GPUs, against what schedule.h says of
// positions and of who sees what.
#include <map>
#include <random>
#include <set>
#include <tuple>

#include "../support/catch.h"
#include "kernels/cuda/ring_attention_backward_plan.h"
#include "kernels/ops/ring_attention_backward/packed_blocks.h"
#include "packed_cut.h"

using namespace mk;
using namespace mk::ring_attention_backward;
using mk::test::PackedCut;

namespace {

PackedKeyTiles tiles_of_rank(const PackedCut& cut, int rank, int num_heads) {
  return {cut.slices, {{rank}}, num_heads};
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

TEST_CASE("a tile of packed keys takes every query that sees one of them once, head by head") {
  std::mt19937_64 random(2);
  for (int round = 0; round < 150; ++round) {
    const PackedCut cut(random, 900);
    const PackedSlices& slices = cut.slices;
    const int rank = cut.below(slices.nranks), group = 1 + cut.below(3);
    const PackedKeyTiles tiles = tiles_of_rank(cut, rank, 1);
    for (int index = 0; index < tiles.size(); ++index) {
      const KeyTile tile = tiles.at(index);
      const int source = tiles.source(tile.step);
      const RowRange keys = PackedKeyTiles::rows_of(tile);
      if (!sees_some(slices, rank, source, keys)) continue;
      PackedQueryBlockWalk walk(slices, rank, group, source, keys);
      int left = walk.count();
      REQUIRE(left > 0);
      std::pair<int, int> before = {-1, -1};
      std::set<std::pair<int, int>> taken;
      for (PackedQueryBlock block; walk.next(&block); --left) {
        REQUIRE(std::pair(block.head, block.index) > before);
        before = {block.head, block.index};
        REQUIRE((block.head < group && block.index * BLOCK_ROWS < slices.rows(rank)));
        taken.insert(before);
        const RowRange queries = {block.index * BLOCK_ROWS, (block.index + 1) * BLOCK_ROWS};
        REQUIRE(cut.sees_some(rank, queries, source, keys));
        const bool all = queries.end <= slices.rows(rank) && cut.sees_all(rank, queries, source, keys);
        REQUIRE(block.is_masked == !all);
      }
      REQUIRE(left == 0);
      for (int block = 0; block * BLOCK_ROWS < slices.rows(rank); ++block) {
        if (!cut.sees_some(rank, {block * BLOCK_ROWS, (block + 1) * BLOCK_ROWS}, source, keys)) continue;
        for (int head = 0; head < group; ++head) REQUIRE(taken.count({head, block}) == 1);
      }
    }
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
