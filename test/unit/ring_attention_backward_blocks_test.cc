// SPDX-License-Identifier: MIT
// How the gradients of ring attention are cut up on GPUs, against what schedule.h says of positions and of who
// sees what.
#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <tuple>
#include <vector>

#include "../support/catch.h"
#include "kernels/cuda/ring_attention_backward_plan.h"
#include "kernels/ops/ring_attention/schedule.h"
#include "key_turns.h"

using namespace mk;
using namespace mk::ring_attention_backward;
using mk::ring_attention::Slices;

namespace {

RingAttentionCall random_call(std::mt19937_64& random) {
  const auto below = [&](uint64_t bound) { return static_cast<int>(random() % bound); };
  RingAttentionCall call;
  call.op = MK_OPERATOR_RING_ATTENTION_BACKWARD;
  call.batch = 1 + below(2);
  call.seq = below(3) == 0 ? below(100) : below(2500);
  call.kv_heads = 1 + below(3);
  call.heads = call.kv_heads * (1 + below(3));
  call.dim = 8 * (1 + below(16));
  call.causal = static_cast<mk_causal_t>(below(3));
  return call;
}

// A call as every rank plans it, and its positions in schedule.h's words.
struct Cut {
  RingAttentionCall call;
  int nranks;
  Slices expected;
  std::vector<RingAttentionBackwardPlan> plans;

  explicit Cut(std::mt19937_64& random)
      : call(random_call(random)),
        nranks(1 + static_cast<int>(random() % 5)),
        expected{call.seq, nranks, call.causal != MK_CAUSAL_NONE, call.causal == MK_CAUSAL_ZIGZAG, 0, nullptr} {
    for (int rank = 0; rank < nranks; ++rank) {
      auto plan = ring_attention_backward_plan(call, rank, nranks, 132);
      REQUIRE(plan.ok());
      plans.push_back(plan.take());
    }
  }

  bool sees(int64_t query, int64_t key) const { return key < expected.visible_end(query); }
  // Does a query of `rank` see one of `count` keys from `position` on?
  bool sees_some(int rank, int position, int count) const {
    for (int64_t row = 0; row < expected.rows(rank); ++row) {
      const int64_t query = expected.position(rank, row);
      for (int key = position; key < position + count; ++key) {
        if (sees(query, key)) return true;
      }
    }
    return false;
  }
  // A rank's tiles, of which those of one to three heads are handed out in turn.
  KeyTiles tiles_of_few_heads(int rank, std::mt19937_64& random) const {
    KeyTiles tiles = plans[static_cast<size_t>(rank)].key_tiles;
    tiles.heads_at_once = 1 + static_cast<int>(random() % 3);
    return tiles;
  }
  // The position of a source's tile in its run.
  int row_of(const KeyTiles& tiles, const KeyTile& tile) const {
    return tiles.slices.first_row(tiles.source(tile.step), tile.run) + tile.index * TILE_ROWS;
  }
};

}  // namespace

TEST_CASE("tiles of keys are all those of which a rank sees something, each once, its own last") {
  std::mt19937_64 random(1);
  for (int round = 0; round < 150; ++round) {
    const Cut cut(random);
    const int rank = static_cast<int>(random() % static_cast<uint64_t>(cut.nranks));
    const KeyTiles tiles = cut.tiles_of_few_heads(rank, random);
    std::set<std::tuple<int, int, int, int>> seen;
    int turn = 0;
    REQUIRE(cut.plans[static_cast<size_t>(rank)].num_key_tiles == tiles.size());
    for (int index = 0; index < tiles.size(); ++index) {
      const KeyTile tile = tiles.at(index);
      const int source = (rank + tile.step) % cut.nranks;
      REQUIRE(seen.emplace(tile.step, tile.head, tile.run, tile.index).second);
      REQUIRE((tile.step + cut.nranks - 1) % cut.nranks >= turn);
      turn = (tile.step + cut.nranks - 1) % cut.nranks;
      REQUIRE((tile.num_rows > 0 && tile.num_rows <= TILE_ROWS));
      REQUIRE(cut.expected.position(source, cut.row_of(tiles, tile)) == tile.position);
      REQUIRE(cut.expected.position(source, cut.row_of(tiles, tile) + tile.num_rows - 1) ==
              tile.position + tile.num_rows - 1);
      for (int block = 0; block < tile.num_rows; block += BLOCK_ROWS)
        REQUIRE(cut.sees_some(rank, tile.position + block, std::min(BLOCK_ROWS, tile.num_rows - block)));
    }
    // None is missing: of each run those up to the last key that is seen.
    for (int step = 0; step < cut.nranks; ++step) {
      const int source = (rank + step) % cut.nranks;
      for (int run = 0; run < tiles.slices.num_runs(); ++run) {
        const int begin = tiles.slices.begin(source, run), count = tiles.slices.count(source, run);
        for (int tile = 0; tile * TILE_ROWS < count; ++tile) {
          const int rows = std::min(TILE_ROWS, count - tile * TILE_ROWS);
          const bool some = cut.sees_some(rank, begin + tile * TILE_ROWS, rows);
          for (int head = 0; head < tiles.num_heads; ++head)
            REQUIRE((seen.count({step, head, run, tile}) == 1) == some);
        }
      }
    }
  }
}

TEST_CASE("a tile of keys takes every query that sees one of them once, the last positions first") {
  std::mt19937_64 random(2);
  for (int round = 0; round < 100; ++round) {
    const Cut cut(random);
    const int rank = static_cast<int>(random() % static_cast<uint64_t>(cut.nranks));
    const KeyTiles& tiles = cut.plans[static_cast<size_t>(rank)].key_tiles;
    for (int64_t index = 0; index < tiles.size(); index += 1 + static_cast<int64_t>(random() % 7)) {
      const KeyTile tile = tiles.at(static_cast<int>(index));
      QueryBlockWalk walk(tiles.slices, rank, tile.position);
      int left = walk.count(), position = INT32_MAX;
      REQUIRE(left > 0);
      std::set<int64_t> queries;
      for (QueryStretch stretch; walk.next(&stretch);) {
        for (int number = stretch.last; number >= stretch.first; --number, --left) {
          const QueryBlock block = walk.block(stretch, number);
          REQUIRE((block.run == stretch.run && block.index == number));
          REQUIRE(block.position < position);
          position = block.position;
          REQUIRE((block.num_rows > 0 && block.num_rows <= BLOCK_ROWS));
          REQUIRE(block.row == tiles.slices.first_row(rank, block.run) + block.index * BLOCK_ROWS);
          bool some = false;
          for (int i = 0; i < block.num_rows; ++i) {
            REQUIRE(queries.emplace(block.row + i).second);
            if (cut.expected.position(rank, block.row + i) != block.position + i) FAIL("a wrong position");
            some = some || cut.sees(block.position + i, tile.position);
          }
          REQUIRE(some);
        }
      }
      REQUIRE(left == 0);
      for (int64_t row = 0; row < cut.expected.rows(rank); ++row) {
        if (!cut.sees(cut.expected.position(rank, row), tile.position)) continue;
        REQUIRE(queries.count(row) == 1);
      }
    }
  }
}

TEST_CASE("tiles have turns with each block of queries in the order in which they are handed out") {
  std::mt19937_64 random(4);
  for (int round = 0; round < 150; ++round) {
    const Cut cut(random);
    const int rank = static_cast<int>(random() % static_cast<uint64_t>(cut.nranks));
    test::check_turns(cut.tiles_of_few_heads(rank, random), rank);
  }
}

TEST_CASE("one rank's tiles at different blocks get through, and none waits while no head is left over") {
  std::mt19937_64 random(6);
  int num_circular = 0;
  for (int round = 0; round < 300; ++round) {
    RingAttentionCall call = random_call(random);
    const int num_ctas = 1 + static_cast<int>(random() % 140);
    const RingAttentionBackwardPlan plan = ring_attention_backward_plan(call, 0, 1, num_ctas).take();
    if (!plan.is_circular()) continue;
    ++num_circular;
    const CircularKeyTiles& tiles = plan.circular;
    INFO("S " << call.seq << " of " << tiles.num_heads << " heads, CTAs " << num_ctas);
    const int of_head = tiles.of_head(), num_blocks = blocks_of(static_cast<int>(call.seq));
    REQUIRE((call.causal == MK_CAUSAL_NONE && of_head <= plan.plan.compute_ctas));
    REQUIRE(tiles.size() == plan.num_key_tiles);
    std::set<std::pair<int, int>> seen;
    std::vector<std::vector<test::BlockTurn>> turns;
    for (int index = 0; index < tiles.size(); ++index) {
      const KeyTile tile = tiles.at(index);
      REQUIRE(seen.emplace(tile.head, tile.index).second);
      REQUIRE((tile.step == 0 && tile.run == 0 && tile.position == tile.index * TILE_ROWS));
      REQUIRE((tile.num_rows > 0 && tile.num_rows == std::min<int64_t>(TILE_ROWS, call.seq - tile.position)));
      const CircularQueryWalk walk(tiles, tile);
      turns.push_back(test::turns_of_tile(turns_of(tiles), tile, walk));
      std::set<int> blocks;
      for (const test::BlockTurn& turn : turns.back()) REQUIRE(blocks.insert(std::get<2>(turn.block)).second);
      REQUIRE((static_cast<int>(blocks.size()) == num_blocks && walk.count() == num_blocks));
      REQUIRE((*blocks.begin() == 0 && *blocks.rbegin() == num_blocks - 1));
      const QueryBlock last = walk.block({}, num_blocks - 1);
      REQUIRE((last.row == (num_blocks - 1) * BLOCK_ROWS && last.position == last.row));
      REQUIRE(last.num_rows == call.seq - last.row);
    }
    int64_t num_waits = 0;
    auto last = test::take_turns(turns, plan.plan.compute_ctas, &num_waits);
    if (tiles.size() <= plan.plan.compute_ctas) REQUIRE(num_waits == 0);
    for (int head = 0; head < tiles.num_heads; ++head) {
      for (int block = 0; block < num_blocks; ++block)
        REQUIRE((last[{head, 0, block}]) == turns_of(tiles).last(head, {0, 0, block, 0, 0, 0}));
    }
    // With a CTA less than a head has tiles all wait in the end.
    REQUIRE(test::take_turns(turns, of_head - 1).empty());
  }
  REQUIRE(num_circular > 20);
}

TEST_CASE("one rank's tiles without a mask begin at different blocks where that pays") {
  RingAttentionCall call;
  call.op = MK_OPERATOR_RING_ATTENTION_BACKWARD;
  call.dim = 128;
  const auto is_circular = [&](int64_t batch, int64_t seq, int64_t heads, int64_t kv_heads, int nranks = 1,
                               mk_causal_t causal = MK_CAUSAL_NONE) {
    call.batch = batch;
    call.seq = seq;
    call.heads = heads;
    call.kv_heads = kv_heads;
    call.causal = causal;
    return ring_attention_backward_plan(call, 0, nranks, 132)->is_circular();
  };
  CHECK(!is_circular(1, 0, 16, 16));
  CHECK(!is_circular(1, 128, 16, 16));  // one tile
  CHECK(is_circular(1, 1024, 16, 16));
  CHECK(!is_circular(1, 1024, 16, 16, 2));
  CHECK(!is_circular(1, 1024, 16, 16, 1, MK_CAUSAL_CONTIGUOUS));
  CHECK(!is_circular(1, 1024, 16, 16, 1, MK_CAUSAL_ZIGZAG));
  CHECK(is_circular(1, 2048, 16, 16));
  CHECK(!is_circular(1, 3000, 16, 16));   // 4 rounds of 120 tiles, or 3 of 132
  CHECK(is_circular(1, 4096, 2, 2));      // of which each would wait for 31 others
  CHECK(!is_circular(4, 2048, 16, 16));   // of which each waits for 9
  CHECK(is_circular(1, 8192, 16, 16));    // 32
  CHECK(!is_circular(1, 20000, 16, 16));  // more tiles than CTAs
  CHECK(!is_circular(2, 2048, 32, 8));    // share 64 MiB
  CHECK(is_circular(1, 1024, 32, 8));
}

TEST_CASE("sums of dQ and whose turn it was lie behind everything else, apart from each other") {
  std::mt19937_64 random(5);
  for (int round = 0; round < 50; ++round) {
    const Cut cut(random);
    const GradientPanels& panels = cut.plans[0].panels;
    const QueryRowPlaces rows = panels.row_places();
    const QuerySumPlaces sums = panels.query_sums();
    REQUIRE(sums.num_blocks == rows.num_blocks());
    REQUIRE(sums.sums(0) >= rows.end());
    REQUIRE(sums.sums(0) % 128 == 0);
    REQUIRE(sums.block_bytes == BLOCK_ROWS * panels.head_dim * 4);
    if (sums.num_blocks > 0) {
      REQUIRE(sums.turn(0) >= sums.sums(sums.num_blocks - 1) + static_cast<size_t>(sums.block_bytes));
      REQUIRE(panels.area_bytes() >= sums.turn(sums.num_blocks - 1) + 4);
    }
    REQUIRE(static_cast<size_t>(cut.plans[0].area_bytes) >= panels.area_bytes());
  }
}

TEST_CASE("as many heads are in turn as share what the L2 holds, all of them if they are few") {
  RingAttentionCall call;
  call.op = MK_OPERATOR_RING_ATTENTION_BACKWARD;
  call.batch = 1;
  call.dim = 128;
  const auto heads_of = [&](int64_t batch, int64_t seq, int64_t heads, int64_t kv_heads, mk_causal_t causal,
                            int nranks = 1) {
    call.batch = batch;
    call.seq = seq;
    call.heads = heads;
    call.kv_heads = kv_heads;
    call.causal = causal;
    return ring_attention_backward_plan(call, 0, nranks, 132)->key_tiles.heads_at_once;
  };
  CHECK(heads_of(1, 4096, 16, 16, MK_CAUSAL_NONE) == 16);  // 64 MiB
  CHECK(heads_of(1, 4097, 16, 16, MK_CAUSAL_NONE) == 8);
  CHECK(heads_of(4, 512, 16, 16, MK_CAUSAL_NONE) == 64);
  CHECK(heads_of(4, 3072, 16, 16, MK_CAUSAL_NONE) == 8);  // 192 MiB
  CHECK(heads_of(4, 3072, 16, 16, MK_CAUSAL_CONTIGUOUS) == 16);
  CHECK(heads_of(1, 8192, 16, 16, MK_CAUSAL_CONTIGUOUS) == 8);
  CHECK(heads_of(4, 12288, 16, 16, MK_CAUSAL_CONTIGUOUS) == 4);
  CHECK(heads_of(4, 12288, 16, 4, MK_CAUSAL_CONTIGUOUS) == 2);  // a fourth of them, but at least two
  CHECK(heads_of(1, 98304, 8, 8, MK_CAUSAL_NONE) == 2);
  CHECK(heads_of(1, 98304, 1, 1, MK_CAUSAL_NONE) == 1);
  CHECK(heads_of(4, 2048, 16, 16, MK_CAUSAL_NONE, 4) == 16);  // keys arrive head by head
  CHECK(heads_of(1, 2048, 4, 4, MK_CAUSAL_NONE, 4) == 4);
  CHECK(heads_of(4, 24576, 16, 16, MK_CAUSAL_NONE, 4) == 4);
  CHECK(heads_of(4, 24576, 16, 16, MK_CAUSAL_ZIGZAG, 4) == 8);
}

TEST_CASE("a tile's place among folded ones is found again, and long and short ones are in turn") {
  for (int count = 1; count < 20; ++count) {
    std::set<int> tiles;
    for (int place = 0; place < count; ++place) {
      const int tile = folded_tile(place, count);
      REQUIRE((tile >= 0 && tile < count && tiles.insert(tile).second));
      REQUIRE(folded_place(tile, count) == place);
      REQUIRE((place % 2 == 0) == (tile < (count + 1) / 2));
    }
  }
}

TEST_CASE("parts have places and flags of their own, which owner and sender agree on") {
  std::mt19937_64 random(3);
  for (int round = 0; round < 100; ++round) {
    const Cut cut(random);
    std::map<int, std::set<size_t>> places;                  // of an owner
    std::map<std::pair<int, int>, int> tiles_of_flag;        // of an owner
    std::map<std::tuple<int, int, int, int>, int> expected;  // of a sender, as its signal warp counts
    for (int rank = 0; rank < cut.nranks; ++rank) {
      const RingAttentionBackwardPlan& plan = cut.plans[static_cast<size_t>(rank)];
      const GradientPanels& panels = plan.panels;
      REQUIRE((panels.panel_blocks % TILE_BLOCKS == 0 && panels.num_flags() <= kFlagsPerBank));
      REQUIRE(static_cast<int64_t>(panels.area_bytes()) <= plan.area_bytes);
      for (int index = 0; index < plan.num_key_tiles; ++index) {
        const KeyTile tile = plan.key_tiles.at(index);
        if (tile.step == 0) continue;
        const int owner = (rank + tile.step) % cut.nranks, step = cut.nranks - tile.step;
        const size_t place = panels.part(step, tile.head, tile.run, tile.index);
        REQUIRE(places[owner].insert(place).second);
        REQUIRE(place >= panels.KeyPanels::area_bytes());
        REQUIRE(place + static_cast<size_t>(panels.part_bytes()) <= panels.rows(0, 0, 0));
        const int flag = panels.part_flag(step, tile.head, tile.run, tile.index);
        REQUIRE((flag >= panels.KeyPanels::num_flags() && flag < panels.num_flags()));
        ++tiles_of_flag[{owner, flag}];
        const int first = tile.index / panels.panel_tiles() * panels.panel_tiles();
        expected[{owner, flag, 0, 0}] =
            std::min(panels.panel_tiles(), plan.key_tiles.seen_tiles_of(tile.step, tile.run) - first);
      }
    }
    for (const auto& [flag, count] : tiles_of_flag) REQUIRE(expected[{flag.first, flag.second, 0, 0}] == count);
    // What an owner waits for is what the others send.
    for (int owner = 0; owner < cut.nranks; ++owner) {
      const RingAttentionBackwardPlan& plan = cut.plans[static_cast<size_t>(owner)];
      size_t waited = 0;
      for (int index = 0; index < plan.num_key_tiles; ++index) {
        const KeyTile tile = plan.key_tiles.at(index);
        for (int step = 1; step < cut.nranks && tile.step == 0; ++step) {
          const int source = plan.key_tiles.source(step);
          if (tile.index >= seen_tiles(plan.tiles.slices, source, owner, tile.run)) continue;
          ++waited;
          REQUIRE(places[owner].count(plan.panels.part(step, tile.head, tile.run, tile.index)) == 1);
        }
      }
      REQUIRE(waited == places[owner].size());
    }
  }
}

TEST_CASE("rows of queries have places of their own behind the parts") {
  std::mt19937_64 random(4);
  for (int round = 0; round < 100; ++round) {
    const Cut cut(random);
    const GradientPanels& panels = cut.plans[0].panels;
    std::set<size_t> places;
    const size_t begin = cut.nranks > 1 ? panels.part(cut.nranks, 0, 0, 0) : 0;
    for (int head = 0; head < panels.num_query_heads; ++head) {
      for (int run = 0; run < panels.num_runs; ++run) {
        for (int block = 0; block < panels.run_blocks; ++block) {
          const size_t place = panels.rows(head, run, block);
          REQUIRE(places.insert(place).second);
          REQUIRE((place >= begin && place % 16 == 0 && place + panels.ROW_BYTES <= panels.area_bytes()));
        }
      }
    }
  }
}

TEST_CASE("an arena for maxima of gradients holds every call within them") {
  RingAttentionCall maxima;
  maxima.op = MK_OPERATOR_RING_ATTENTION_BACKWARD;
  maxima.batch = 2;
  maxima.seq = 1000;
  maxima.heads = 8;
  maxima.kv_heads = 4;
  maxima.dim = 128;
  std::mt19937_64 random(5);
  for (const int nranks : {1, 2, 3, 8}) {
    auto prepared = ring_attention_backward_plan(maxima, 0, nranks, 132);
    REQUIRE(prepared.ok());
    for (int round = 0; round < 200; ++round) {
      RingAttentionCall call = maxima;
      call.batch = static_cast<int64_t>(random() % 3);
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

TEST_CASE("gradients that are not built for GPUs are refused in words") {
  RingAttentionCall call;
  call.op = MK_OPERATOR_RING_ATTENTION_BACKWARD;
  call.batch = call.heads = call.kv_heads = 1;
  call.seq = 100;
  call.dim = 136;
  const auto sentence = [](const RingAttentionCall& refused, int nranks) {
    const auto plan = ring_attention_backward_plan(refused, 0, nranks, 132);
    return plan.ok() ? std::string() : plan.status().sentence();
  };
  CHECK(sentence(call, 2).find("dim: at most 128 on GPUs, saw 136") != std::string::npos);
  call.dim = 64;
  CHECK(sentence(call, 2) == "");
  call.num_sequences = 2;
  CHECK(sentence(call, 2) == "");
  call.num_sequences = 0;
  call.batch = kFlagsPerBank / 2;  // two flags a head of another rank
  CHECK(sentence(call, 2) == "");
  ++call.batch;
  CHECK(sentence(call, 2).find("are more than there are flags for") != std::string::npos);
}
