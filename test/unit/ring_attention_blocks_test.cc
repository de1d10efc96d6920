// SPDX-License-Identifier: MIT
// How ring attention is cut up on GPUs, against what schedule.h says of positions and of who sees what.
#include <algorithm>
#include <cmath>
#include <random>
#include <set>
#include <tuple>
#include <vector>

#include "../support/catch.h"
#include "kernels/cuda/link_rates.h"
#include "kernels/cuda/query_items_plan.h"
#include "kernels/cuda/ring_attention_plan.h"
#include "kernels/device/rank_comm.h"
#include "kernels/ops/ring_attention/cuda_blocks.h"
#include "kernels/ops/ring_attention/schedule.h"

using namespace mk;
using namespace mk::ring_attention;

namespace {

// A random cut of a random sequence, and the same in schedule.h's words.
struct Cut {
  CudaSlices slices;
  Slices expected;
  QueryTiles tiles;
  int block_n;

  explicit Cut(std::mt19937_64& random) {
    const auto below = [&](uint64_t bound) { return static_cast<int>(random() % bound); };
    const int nranks = 1 + below(5), seq = 1 + below(300);
    const bool causal = below(2) == 0, zigzag = causal && below(2) == 0;
    const int num_slices = zigzag ? 2 * nranks : nranks;
    slices = {seq, nranks, (seq + num_slices - 1) / num_slices, causal, zigzag};
    expected = {seq, nranks, causal, zigzag, 0, nullptr};
    const int kv_heads = 1 + below(3);
    tiles = {slices,
             below(static_cast<uint64_t>(nranks)),
             1 + below(2),
             kv_heads * (1 + below(3)),
             kv_heads,
             1 + below(40),
             1};
    tiles.joint_heads = 1 + below(static_cast<uint64_t>(tiles.batch * tiles.kv_heads));
    block_n = 1 + below(40);
  }

  bool sees(int64_t query, int64_t key) const { return key < expected.visible_end(query); }
};

// "" or what is wrong with the blocks that a tile takes.
std::string walk_problem(const Cut& cut, const QueryTile& tile) {
  const CudaSlices& slices = cut.slices;
  const int last = tile.position + tile.num_rows - 1;
  KeyBlockWalk walk(slices, RingOrder{cut.tiles.rank}, cut.block_n, visible_ends(slices, tile.position, last));
  std::set<int> keys;
  int step = 0, left = walk.count();
  for (KeyBlock block; walk.next(&block);) {
    const int source = (cut.tiles.rank + block.step) % slices.nranks;
    --left;
    if (block.step < step) return "a source out of turn";
    step = block.step;
    if (block.position != slices.begin(source, block.run) + block.index * cut.block_n)
      return "a wrong position";
    bool all = true, some = false;
    for (int key = block.position; key < block.position + cut.block_n; ++key) {
      if (key >= block.run_end) {
        all = false;
        continue;
      }
      if (!keys.insert(key).second) return "a key twice";
      for (int query = tile.position; query <= last; ++query) {
        const bool sees = cut.sees(query, key);
        some = some || sees;
        all = all && sees;
      }
    }
    if (!some) return "a block of which nobody sees anything";
    if (block.is_masked == all) return "a wrong mask";
    if (!sees_some(slices, cut.tiles.rank, block.position,
                   std::min(block.position + cut.block_n, block.run_end)))
      return "a block that does not travel";
  }
  if (left != 0) return "a wrong count";
  for (int query = tile.position; query <= last; ++query) {
    for (int key = 0; key < slices.seq; ++key) {
      if (cut.sees(query, key) && keys.count(key) == 0) return "a key is missing";
    }
  }
  return "";
}

}  // namespace

TEST_CASE("runs are schedule.h's") {
  std::mt19937_64 random(1);
  for (int round = 0; round < 500; ++round) {
    const Cut cut(random);
    for (int rank = 0; rank < cut.slices.nranks; ++rank) {
      REQUIRE(cut.slices.rows(rank) == cut.expected.rows(rank));
      for (int run = 0; run < cut.slices.num_runs(); ++run) {
        for (int i = 0; i < cut.slices.count(rank, run); ++i) {
          const int row = cut.slices.first_row(rank, run) + i;
          if (cut.expected.position(rank, row) != cut.slices.begin(rank, run) + i)
            FAIL("position of row " << row);
        }
      }
    }
  }
}

TEST_CASE("tiles hold every row of every head once, and take every key that they see once") {
  std::mt19937_64 random(2);
  for (int round = 0; round < 500; ++round) {
    const Cut cut(random);
    const int64_t rows = cut.slices.rows(cut.tiles.rank);
    std::set<std::tuple<int, int, int64_t>> seen;
    for (int index = 0; index < cut.tiles.size(); ++index) {
      const QueryTile tile = cut.tiles.at(index);
      REQUIRE(tile.num_rows > 0);
      REQUIRE(tile.kv_head == tile.head / (cut.tiles.heads / cut.tiles.kv_heads));
      for (int i = 0; i < tile.num_rows; ++i) {
        REQUIRE(seen.emplace(tile.batch, tile.head, tile.row + i).second);
        if (cut.expected.position(cut.tiles.rank, tile.row + i) != tile.position + i) FAIL("a wrong position");
      }
      REQUIRE(walk_problem(cut, tile) == "");
    }
    REQUIRE(static_cast<int64_t>(seen.size()) == cut.tiles.batch * cut.tiles.heads * rows);
  }
}

TEST_CASE("the last heads are handed out together, the last positions first") {
  std::mt19937_64 random(5);
  for (int round = 0; round < 200; ++round) {
    Cut cut(random);
    if (cut.tiles.size() == 0) continue;
    const int kv_heads = cut.tiles.batch * cut.tiles.kv_heads, group = cut.tiles.heads / cut.tiles.kv_heads;
    const int head_tiles = cut.tiles.tiles_of_head() * group;
    int before = -1, position = 0;
    for (int index = 0; index < cut.tiles.size(); ++index) {
      const QueryTile tile = cut.tiles.at(index);
      const int head = std::min(index / head_tiles, kv_heads - cut.tiles.joint_heads);
      REQUIRE(tile.batch * cut.tiles.kv_heads + tile.kv_head >= head);
      if (head == before) REQUIRE(tile.position <= position);
      before = head;
      position = tile.position;
    }
  }
}

TEST_CASE("blocks that are left out are those that would have come") {
  std::mt19937_64 random(6);
  for (int round = 0; round < 500; ++round) {
    const Cut cut(random);
    if (cut.tiles.size() == 0) continue;
    const QueryTile tile = cut.tiles.at(static_cast<int>(random() % static_cast<uint64_t>(cut.tiles.size())));
    const VisibleEnds visible = visible_ends(cut.slices, tile.position, tile.position + tile.num_rows - 1);
    KeyBlockWalk all(cut.slices, RingOrder{cut.tiles.rank}, cut.block_n, visible), rest(all);
    const int num_blocks = all.count();
    const int left_out = static_cast<int>(random() % (static_cast<uint64_t>(num_blocks) + 1));
    rest.skip(left_out);
    KeyBlock expected, seen;
    for (int i = 0; i < left_out; ++i) REQUIRE(all.next(&expected));
    for (int i = left_out; i < num_blocks; ++i) {
      REQUIRE((all.next(&expected) && rest.next(&seen)));
      REQUIRE(seen.step == expected.step);
      REQUIRE(seen.position == expected.position);
      REQUIRE(seen.is_masked == expected.is_masked);
    }
    REQUIRE_FALSE(rest.next(&seen));
  }
}

TEST_CASE("every tile is handed out once, whole or in all its parts, for which there is room") {
  std::mt19937_64 random(7);
  const auto below = [&](uint64_t bound) { return static_cast<int>(random() % bound); };
  int num_cut = 0;
  for (int round = 0; round < 400; ++round) {
    RingAttentionCall call;
    call.op = MK_OPERATOR_RING_ATTENTION;
    const int nranks = 1 + below(8), rank = below(static_cast<uint64_t>(nranks));
    call.batch = 1 + below(3);
    call.seq = below(4) == 0 ? below(40000) : below(6000);
    call.kv_heads = 1 + below(8);
    call.heads = call.kv_heads * (1 + below(3));
    call.dim = below(2) == 0 ? 64 : 128;
    call.causal = static_cast<mk_causal_t>(below(3));
    if (below(3) == 0) call.tuning.compute_ctas = 1 + below(132);
    auto plan = ring_attention_plan(call, rank, nranks, 132);
    REQUIRE(plan.ok());
    const QueryItems& items = plan->items;
    const QueryTiles& tiles = plan->tiles;
    const int block_n = plan->plan.tile_n;
    const PartPlaces places = {tiles.block_m, CUDA_TILES[plan->tile].head_dim};
    REQUIRE((items.num_stretches >= 1 && items.num_stretches <= MOST_STRETCHES));
    int tile = 0, slot = 0, cut = 0;
    for (int item = 0; item < items.num_items; ++tile) {
      const QueryItem first = items.at(item);
      const int parts = first.num_parts;
      REQUIRE(parts >= 1);
      REQUIRE(first.tile == tile);
      if (parts > 1) {
        const QueryTile queries = tiles.at(tile);
        KeyBlockWalk walk(
            tiles.slices, RingOrder{rank}, block_n,
            visible_ends(tiles.slices, queries.position, queries.position + queries.num_rows - 1));
        const int num_blocks = walk.count();
        REQUIRE(parts <= MOST_PARTS);
        REQUIRE(parts <= num_blocks);
        REQUIRE((part_begin(num_blocks, 0, parts) == 0 && part_begin(num_blocks, parts, parts) == num_blocks));
        REQUIRE(blocks_before(tiles.slices,
                              call.causal != MK_CAUSAL_NONE ? queries.position + queries.num_rows : call.seq,
                              block_n) == num_blocks);
        REQUIRE(items.first_part(cut).tile == tile);
        REQUIRE(items.first_part(cut).part == 0);
      }
      for (int part = 0; part < parts; ++part, ++item) {
        const QueryItem of_part = items.at(item);
        REQUIRE((of_part.tile == tile && of_part.part == part && of_part.num_parts == parts));
        REQUIRE(of_part.slot == (parts > 1 ? slot++ : -1));
        if (parts > 1) REQUIRE(of_part.cut == cut);
      }
      cut += parts > 1 ? 1 : 0;
    }
    REQUIRE(tile == tiles.size());
    REQUIRE(cut == items.num_cuts);
    REQUIRE(cut <= static_cast<int>(STAGING_FLAGS_BYTES / sizeof(uint32_t)));
    REQUIRE(static_cast<size_t>(slot) * places.part_bytes() <= 132 * STAGING_BYTES);
    num_cut += cut > 0 ? 1 : 0;
  }
  CHECK(num_cut > 50);
}

TEST_CASE("tiles are cut where SMs would be idle for long, and only there") {
  RingAttentionCall call;
  call.op = MK_OPERATOR_RING_ATTENTION;
  call.batch = 1;
  call.dim = 128;
  const auto cuts = [&](int64_t seq, int heads, int kv_heads, mk_causal_t causal, int nranks) {
    call.seq = seq;
    call.heads = heads;
    call.kv_heads = kv_heads;
    call.causal = causal;
    auto plan = ring_attention_plan(call, 0, nranks, 132);
    REQUIRE(plan.ok());
    return plan->items.num_cuts;
  };
  CHECK(cuts(4096, 1, 1, MK_CAUSAL_NONE, 1) == 32);       // 32 tiles, 132 SMs
  CHECK(cuts(2048, 16, 16, MK_CAUSAL_NONE, 1) == 0);      // 1.94 of 2 rounds
  CHECK(cuts(8192, 8, 8, MK_CAUSAL_CONTIGUOUS, 1) == 0);  // short tiles fill up what long ones leave
  CHECK(cuts(32768, 8, 8, MK_CAUSAL_ZIGZAG, 4) > 0);      // few of them, of long ones and of short ones
  // What attention_test calls cut.
  for (const int nranks : {1, 2, 3, 4}) CHECK(cuts(2600, 2, 1, MK_CAUSAL_ZIGZAG, nranks) > 0);
}

TEST_CASE("causal tiles are handed out together where keys are there in time") {
  RingAttentionCall call;
  call.op = MK_OPERATOR_RING_ATTENTION;
  call.batch = 1;
  call.dim = 128;
  call.heads = call.kv_heads = 8;
  call.causal = MK_CAUSAL_ZIGZAG;
  const auto joint_heads = [&](int64_t seq, int nranks) {
    call.seq = seq;
    auto plan = ring_attention_plan(call, 0, nranks, 132);
    REQUIRE(plan.ok());
    return plan->tiles.joint_heads;
  };
  CHECK(joint_heads(8192, 1) == 8);
  CHECK(joint_heads(16384, 2) == 8);  // all keys come in 92 us, and a tile has those of its own for 92
  CHECK(joint_heads(32768, 4) == 5);  // in 272 us: the first heads, which all CTAs begin with, one by one
}

// What docs/decisions/014 and docs/experiments/attention.md say that the plan's simulation says.
TEST_CASE("launches as the plan simulates them: tiles whole and head by head, and as planned") {
  struct Shape {
    int nranks;
    int batch, heads;
    int64_t seq;
    mk_causal_t causal;
    double before_us;  // whole tiles, head by head
    double of_ideal;   // before_us, relative to what all CTAs together need
    double planned;    // as planned, relative to before_us
  };
  const Shape shapes[] = {{1, 1, 8, 8192, MK_CAUSAL_CONTIGUOUS, 231.1, 1.221, 0.820},
                          {1, 1, 16, 4096, MK_CAUSAL_CONTIGUOUS, 128.9, 1.259, 0.808},
                          {1, 4, 16, 6144, MK_CAUSAL_CONTIGUOUS, 910.2, 1.040, 0.967},
                          {1, 1, 1, 4096, MK_CAUSAL_NONE, 48.1, 4.125, 0.778},
                          {1, 4, 16, 6144, MK_CAUSAL_NONE, 1692.0, 1.031, 0.989},
                          {1, 4, 16, 3072, MK_CAUSAL_NONE, 442.8, 1.031, 1.000},
                          {1, 1, 8, 2048, MK_CAUSAL_NONE, 25.7, 1.031, 1.000},
                          {2, 1, 8, 16384, MK_CAUSAL_ZIGZAG, 414.1, 1.130, 0.892},
                          {2, 1, 8, 32768, MK_CAUSAL_ZIGZAG, 1463.2, 1.025, 0.986},
                          {2, 4, 16, 12288, MK_CAUSAL_ZIGZAG, 1740.2, 1.037, 0.967},
                          {2, 4, 16, 24576, MK_CAUSAL_ZIGZAG, 6574.5, 1.014, 0.993},
                          {2, 4, 16, 12288, MK_CAUSAL_NONE, 3304.8, 1.018, 1.000},
                          {2, 4, 16, 24576, MK_CAUSAL_NONE, 12788.7, 1.003, 1.000},
                          {4, 1, 8, 32768, MK_CAUSAL_ZIGZAG, 797.7, 1.106, 0.939},
                          {4, 4, 16, 6144, MK_CAUSAL_ZIGZAG, 278.5, 1.187, 1.000},
                          {4, 4, 16, 12288, MK_CAUSAL_ZIGZAG, 939.1, 1.092, 0.932},
                          {4, 4, 16, 24576, MK_CAUSAL_ZIGZAG, 3399.2, 1.035, 0.982},
                          {4, 4, 16, 12288, MK_CAUSAL_NONE, 1790.1, 1.075, 0.952},
                          {4, 4, 16, 24576, MK_CAUSAL_NONE, 6530.4, 1.011, 1.000},
                          {4, 4, 16, 6144, MK_CAUSAL_NONE, 493.5, 1.117, 0.958},
                          {2, 4, 16, 3072, MK_CAUSAL_NONE, 258.3, 1.147, 1.000},
                          {8, 1, 8, 65536, MK_CAUSAL_ZIGZAG, 1678.3, 1.174, 0.874}};
  for (const Shape& shape : shapes) {
    RingAttentionCall call;
    call.op = MK_OPERATOR_RING_ATTENTION;
    call.batch = shape.batch;
    call.heads = call.kv_heads = shape.heads;
    call.dim = 128;
    call.seq = shape.seq;
    call.causal = shape.causal;
    const auto plan = ring_attention_plan(call, 0, shape.nranks, 132);
    REQUIRE(plan.ok());
    const double push_us = static_cast<double>(plan.value().plan.link_bytes) / LINK_BYTES_PER_US;
    const CudaTile& tile = CUDA_TILES[plan.value().tile];
    const QueryItemsShape items_shape = {tile, 132, plan.value().num_push_ctas, push_us, push_us, 0, 0};
    QueryTiles in_turn = plan.value().tiles;
    in_turn.joint_heads = 1;
    double sum_us = plan.value().num_push_ctas * push_us;
    for (int at = 0; at < in_turn.size(); ++at) {
      const QueryTile queries = in_turn.at(at);
      const bool causal = shape.causal != MK_CAUSAL_NONE;
      const int64_t end = causal ? queries.position + queries.num_rows : shape.seq;
      sum_us += tile_us(tile, blocks_before(in_turn.slices, end, tile.block_n), causal);
    }
    const double before_us = items_us(items_shape, in_turn, whole_items(in_turn.size()));
    const double planned_us = items_us(items_shape, plan.value().tiles, plan.value().items);
    INFO(shape.nranks << " ranks, batch " << shape.batch << ", heads " << shape.heads << ", seq " << shape.seq
                      << ", causal " << shape.causal << ": " << before_us << " us, " << before_us / sum_us * 132
                      << " of ideal, planned " << planned_us / before_us);
    CHECK(std::abs(before_us / shape.before_us - 1) < 0.001);
    CHECK(std::abs(before_us / sum_us * 132 - shape.of_ideal) < 0.006);
    CHECK(std::abs(planned_us / before_us - shape.planned) < 0.006);
  }
}

TEST_CASE("panels hold every block once, each with a place and a flag of its own, and go to who needs them") {
  std::mt19937_64 random(3);
  for (int round = 0; round < 500; ++round) {
    const Cut cut(random);
    const CudaSlices& slices = cut.slices;
    KeyPanels panels{slices.nranks,
                     cut.tiles.batch * cut.tiles.kv_heads,
                     slices.num_runs(),
                     (slices.slice_rows + cut.block_n - 1) / cut.block_n,
                     1 + static_cast<int>(random() % 3),
                     0,
                     64};
    panels.run_panels = (panels.run_blocks + panels.panel_blocks - 1) / panels.panel_blocks;
    std::set<size_t> places;
    std::set<int> flags;
    for (int step = 1; step < slices.nranks; ++step) {
      for (int head = 0; head < panels.num_heads; ++head) {
        for (int run = 0; run < panels.num_runs; ++run) {
          for (int block = 0; block < panels.run_blocks; ++block) {
            const size_t place = panels.offset(step, head, run, block);
            REQUIRE((places.insert(place).second && place + 128 <= panels.area_bytes()));
          }
          for (int panel = 0; panel < panels.run_panels; ++panel) {
            const int flag = panels.flag(step, head, run, panel);
            REQUIRE((flags.insert(flag).second && flag < panels.num_flags()));
          }
        }
      }
    }
    std::set<std::tuple<int, int, int>> blocks;
    for (int index = 0; index < panels.num_units(); ++index) {
      const PanelUnit unit = panel_unit(panels, slices, cut.tiles.rank, cut.block_n, index);
      for (int i = 0; i < unit.num_blocks; ++i) {
        REQUIRE(blocks.emplace(unit.head, unit.run, unit.block + i).second);
        REQUIRE((unit.block + i) / panels.panel_blocks == unit.panel);
      }
    }
    int expected = 0;
    for (int run = 0; run < slices.num_runs(); ++run)
      expected += (slices.count(cut.tiles.rank, run) + cut.block_n - 1) / cut.block_n;
    REQUIRE(static_cast<int>(blocks.size()) == expected * panels.num_heads);
    for (int receiver = 0; receiver < slices.nranks; ++receiver) {
      const int begin = static_cast<int>(random() % static_cast<uint64_t>(slices.seq));
      const int end = begin + 1 + static_cast<int>(random() % static_cast<uint64_t>(slices.seq - begin));
      bool needs = false;
      for (int64_t row = 0; row < cut.expected.rows(receiver); ++row) {
        for (int key = begin; key < end && !needs; ++key)
          needs = cut.sees(cut.expected.position(receiver, row), key);
      }
      REQUIRE(sees_some(slices, receiver, begin, end) == needs);
    }
  }
}

TEST_CASE("an arena for maxima holds every call within them") {
  RingAttentionCall maxima;
  maxima.op = MK_OPERATOR_RING_ATTENTION;
  maxima.batch = 2;
  maxima.seq = 1000;
  maxima.heads = 8;
  maxima.kv_heads = 4;
  maxima.dim = 128;
  std::mt19937_64 random(4);
  for (const int nranks : {1, 2, 3, 8}) {
    auto prepared = ring_attention_plan(maxima, 0, nranks, 132);
    REQUIRE(prepared.ok());
    for (int round = 0; round < 200; ++round) {
      RingAttentionCall call = maxima;
      call.batch = 1 + static_cast<int64_t>(random() % 2);
      call.seq = static_cast<int64_t>(random() % 1001);
      call.kv_heads = 1 << random() % 3;
      call.dim = 8 * (1 + static_cast<int>(random() % 16));
      call.causal = static_cast<mk_causal_t>(random() % 3);
      auto plan =
          ring_attention_plan(call, static_cast<int>(random() % static_cast<uint64_t>(nranks)), nranks, 132);
      REQUIRE(plan.ok());
      REQUIRE(static_cast<int64_t>(plan->panels.area_bytes()) <= plan->area_bytes);
      REQUIRE(plan->area_bytes <= prepared->area_bytes);
      REQUIRE(plan->panels.num_flags() <= kFlagsPerBank);
      REQUIRE((plan->plan.compute_ctas >= 1 && plan->num_push_ctas <= plan->plan.compute_ctas));
    }
  }
}

TEST_CASE("many long rows have wide tiles of queries, and a caller has the tile that it wants") {
  RingAttentionCall call;
  call.op = MK_OPERATOR_RING_ATTENTION;
  call.batch = 4;
  call.heads = call.kv_heads = 16;
  call.dim = 64;
  const auto tile_of = [&](int64_t seq, int nranks) {
    call.seq = seq;
    auto plan = ring_attention_plan(call, nranks - 1, nranks, 132);
    REQUIRE(plan.ok());
    CHECK(CUDA_TILES[plan->tile].block_m == plan->plan.tile_m);
    CHECK(CUDA_TILES[plan->tile].head_dim == (call.dim <= 64 ? 64 : 128));
    CHECK(plan->tiles.block_m == plan->plan.tile_m);
    return plan->plan.tile_m;
  };
  for (const int nranks : {1, 2, 8}) {
    CHECK(tile_of(512 * nranks, nranks) == 128);
    CHECK(tile_of(6144 * nranks, nranks) == 192);
    CHECK(tile_of(0, nranks) > 0);
  }
  call.causal = MK_CAUSAL_ZIGZAG;
  CHECK(tile_of(1024, 1) == 128);
  CHECK(tile_of(6144, 1) == 192);
  call.tuning.tile_m = 192;
  CHECK(tile_of(300, 3) == 192);
  call.tuning.tile_m = 128;
  CHECK(tile_of(6144, 1) == 128);
  call.dim = 128;
  CHECK(tile_of(6144, 1) == 128);
  call.tuning.tile_m = 192;
  const auto refused = ring_attention_plan(call, 0, 1, 132);
  REQUIRE_FALSE(refused.ok());
  CHECK(refused.status().sentence().find("there is no tile of tile_m=192 for dim=128") != std::string::npos);
}

TEST_CASE("what is not built for GPUs is refused in words") {
  RingAttentionCall call;
  call.op = MK_OPERATOR_RING_ATTENTION;
  call.batch = call.heads = call.kv_heads = 1;
  call.seq = 100;
  call.dim = 136;
  const auto sentence = [](const RingAttentionCall& refused) {
    const auto plan = ring_attention_plan(refused, 0, 2, 132);
    return plan.ok() ? std::string() : plan.status().sentence();
  };
  CHECK(sentence(call).find("dim: at most 128 on GPUs, saw 136") != std::string::npos);
  call.dim = 64;
  CHECK(sentence(call) == "");
  call.num_sequences = 2;
  CHECK(sentence(call) == "");
}
