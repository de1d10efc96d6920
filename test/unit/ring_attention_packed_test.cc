// SPDX-License-Identifier: MIT
// How ring attention over packed sequences is cut up on GPUs, against what schedule.h says of positions and of
// who sees what.
#include <algorithm>
#include <numeric>
#include <random>
#include <set>
#include <tuple>
#include <vector>

#include "../support/catch.h"
#include "kernels/cuda/ring_attention_plan.h"
#include "kernels/device/rank_comm.h"
#include "kernels/ops/ring_attention/cu_seqlens.h"
#include "kernels/ops/ring_attention/packed_blocks.h"
#include "kernels/ops/ring_attention/schedule.h"
#include "packed_cut.h"

using namespace mk;
using namespace mk::ring_attention;
using mk::test::PackedCut;

namespace {

// "" or what is wrong with the blocks that a tile takes.
std::string walk_problem(const PackedCut& cut, int rank, const RowRange& queries, int block_n) {
  const PackedSlices& slices = cut.slices;
  PackedKeyWalk walk(slices, RingOrder{rank}, rank, block_n, queries);
  std::set<std::pair<int, int>> taken;  // sources and rows
  int step = 0, row = -1, left = walk.count();
  for (PackedBlock block; walk.next(&block); --left) {
    const int source = (rank + block.step) % slices.nranks;
    if (block.step < step || (block.step == step && block.row <= row)) return "a block out of turn";
    if (block.step > 0 && block.row != block.index * block_n) return "a block that nobody sends";
    step = block.step;
    row = block.row;
    const RowRange keys = {row, row + block_n};
    for (int key = keys.begin; key < std::min(keys.end, slices.rows(source)); ++key)
      if (!taken.emplace(source, key).second) return "a key twice";
    if (!cut.sees_some(rank, queries, source, keys)) return "a block of which nobody sees anything";
    if (block.step == 0 && !cut.sees_some(rank, queries, source, {row, row + 1}))
      return "a block of own keys that begins too early";
    if (block.is_masked == cut.sees_all(rank, queries, source, keys)) return "a wrong mask";
  }
  if (left != 0) return "a wrong count";
  for (int source = 0; source < slices.nranks; ++source) {
    for (int key = 0; key < slices.rows(source); ++key) {
      if (taken.count({source, key}) == 0 && cut.sees_some(rank, queries, source, {key, key + 1}))
        return "a key is missing";
    }
  }
  return "";
}

}  // namespace

TEST_CASE("rows of packed sequences are schedule.h's") {
  std::mt19937_64 random(1);
  for (int round = 0; round < 500; ++round) {
    const PackedCut cut(random);
    const PackedSlices& slices = cut.slices;
    for (int rank = 0; rank < slices.nranks; ++rank) {
      REQUIRE(slices.rows(rank) == cut.expected.rows(rank));
      REQUIRE(slices.rows(rank) <= packed_rows(cut.call, slices.nranks, slices.zigzag));
      for (int row = 0; row < slices.rows(rank); ++row) {
        const int64_t position = cut.expected.position(rank, row);
        const PackedRow place = packed_row(slices, rank, row);
        if (place.position != position || place.sequence != cut.expected.sequence_at(position))
          FAIL("place of row " << row << " of rank " << rank);
      }
    }
  }
}

TEST_CASE("a row sees rows of every rank, and is seen, as schedule.h says") {
  std::mt19937_64 random(2);
  for (int round = 0; round < 200; ++round) {
    const PackedCut cut(random);
    const PackedSlices& slices = cut.slices;
    for (int rank = 0; rank < slices.nranks; ++rank) {
      for (int row = 0; row < slices.rows(rank); ++row) {
        const PackedRow place = packed_row(slices, rank, row);
        for (int source = 0; source < slices.nranks; ++source) {
          const RowRange visible = slices.visible_rows(source, place.sequence, place.position);
          const RowRange seeing = slices.seeing_rows(source, place.sequence, place.position);
          for (int other = 0; other < slices.rows(source); ++other) {
            if ((other >= visible.begin && other < visible.end) != cut.sees(rank, row, source, other))
              FAIL("row " << row << " of rank " << rank << " and key " << other << " of rank " << source);
            if ((other >= seeing.begin && other < seeing.end) != cut.sees(source, other, rank, row))
              FAIL("key " << row << " of rank " << rank << " and row " << other << " of rank " << source);
          }
        }
      }
    }
  }
}

TEST_CASE("stretches of keys that are seen are found, and no others") {
  std::mt19937_64 random(3);
  for (int round = 0; round < 500; ++round) {
    const PackedCut cut(random);
    const PackedSlices& slices = cut.slices;
    const int rank = cut.below(slices.nranks), source = cut.below(slices.nranks);
    const RowRange queries = cut.range_of(rank), keys = cut.range_of(source);
    std::vector<bool> seen(static_cast<size_t>(keys.end));
    RowRange stretch;
    for (int from = keys.begin; next_seen(slices, source, {from, keys.end}, rank, queries, &stretch);
         from = stretch.end) {
      REQUIRE((stretch.begin >= from && stretch.begin < stretch.end && stretch.end <= keys.end));
      std::fill(seen.begin() + stretch.begin, seen.begin() + stretch.end, true);
    }
    for (int key = keys.begin; key < keys.end; ++key)
      REQUIRE(seen[static_cast<size_t>(key)] == cut.sees_some(rank, queries, source, {key, key + 1}));
    int last = keys.end - 1;
    while (last >= keys.begin && !seen[static_cast<size_t>(last)]) --last;
    REQUIRE(last_seen(slices, source, keys, rank, queries) == (last >= keys.begin ? last : -1));
  }
}

TEST_CASE("tiles of packed rows hold every row of every head once, and take the blocks that they see") {
  std::mt19937_64 random(4);
  for (int round = 0; round < 300; ++round) {
    const PackedCut cut(random);
    const PackedSlices& slices = cut.slices;
    const int rank = cut.below(slices.nranks), kv_heads = 1 + cut.below(3);
    PackedQueryTiles tiles = {slices, rank, kv_heads * (1 + cut.below(3)), kv_heads, 1 + cut.below(40)};
    tiles.joint_heads = 1 + cut.below(kv_heads);
    std::vector<uint16_t> order(static_cast<size_t>(tiles.tiles_of_head()));
    std::iota(order.begin(), order.end(), uint16_t{0});
    std::shuffle(order.begin(), order.end(), cut.random);
    if (cut.below(2) == 0) tiles.order = order.data();
    const int block_n = 1 + cut.below(40);
    std::set<std::pair<int, int>> rows;
    int head = 0, last_row = INT32_MAX;
    for (int index = 0; index < tiles.size(); ++index) {
      const QueryTile tile = tiles.at(index);
      REQUIRE((tile.num_rows > 0 && tile.num_rows <= tiles.block_m && tile.batch == 0));
      REQUIRE(tile.kv_head == tile.head / (tiles.heads / kv_heads));
      const int turn = std::min(tile.kv_head, kv_heads - tiles.joint_heads);
      REQUIRE(turn >= head);
      if (tiles.order == nullptr) REQUIRE((turn > head || tile.row <= last_row));
      head = turn;
      last_row = tile.row;
      for (int i = 0; i < tile.num_rows; ++i) REQUIRE(rows.emplace(tile.head, tile.row + i).second);
      REQUIRE(walk_problem(cut, rank, {tile.row, tile.row + tile.num_rows}, block_n) == "");
    }
    REQUIRE(static_cast<int>(rows.size()) == tiles.heads * slices.rows(rank));
  }
}

TEST_CASE("panels of packed rows go to who needs them, and only there") {
  std::mt19937_64 random(5);
  for (int round = 0; round < 300; ++round) {
    const PackedCut cut(random);
    const PackedSlices& slices = cut.slices;
    const int rank = cut.below(slices.nranks), block_n = 1 + cut.below(40);
    const KeyPanels panels = packed_panels(cut.call, slices.nranks, slices.zigzag, 64, block_n, 1, 1);
    std::set<std::pair<int, int>> blocks;
    for (int index = 0; index < panels.num_units(); ++index) {
      const PackedPanelUnit unit = panel_unit(panels, slices, rank, block_n, index);
      REQUIRE((unit.run == 0 && (unit.num_blocks == 0) == (unit.needed_by == 0)));
      const RowRange all = {unit.block * block_n, (unit.block + panels.panel_blocks) * block_n};
      for (int peer = 0; peer < slices.nranks; ++peer) {
        const bool needs = peer != rank && cut.sees_some(peer, {0, slices.rows(peer)}, rank, all);
        REQUIRE((unit.needed_by >> peer & 1) == (needs ? 1u : 0u));
      }
      for (int i = 0; i < unit.num_blocks; ++i) {
        REQUIRE(blocks.emplace(unit.head, unit.block + i).second);
        REQUIRE((unit.block + i) / panels.panel_blocks == unit.panel);
        REQUIRE((unit.block + i) * block_n < slices.rows(rank));
      }
      if (unit.num_blocks > 0 && unit.num_blocks < panels.panel_blocks)
        REQUIRE((unit.block + unit.num_blocks) * block_n >= slices.rows(rank));
    }
  }
}

TEST_CASE("an arena for maxima of packed sequences holds every call within them") {
  RingAttentionCall maxima;
  maxima.op = MK_OPERATOR_RING_ATTENTION;
  maxima.batch = 2;
  maxima.seq = 1000;
  maxima.heads = 8;
  maxima.kv_heads = 4;
  maxima.dim = 128;
  maxima.num_sequences = 40;
  std::mt19937_64 random(6);
  for (const int nranks : {1, 2, 3, 8}) {
    auto prepared = ring_attention_plan(maxima, 0, nranks, 132);
    REQUIRE(prepared.ok());
    for (int round = 0; round < 300; ++round) {
      RingAttentionCall call = maxima;
      call.num_sequences = static_cast<int>(random() % 41);
      call.batch = call.num_sequences > 0 ? 1 : 1 + static_cast<int64_t>(random() % 2);
      call.seq = static_cast<int64_t>(random() % 1001);
      call.kv_heads = 1 << random() % 3;
      call.dim = 8 * (1 + static_cast<int>(random() % 16));
      call.causal = static_cast<mk_causal_t>(random() % 3);
      auto plan =
          ring_attention_plan(call, static_cast<int>(random() % static_cast<uint64_t>(nranks)), nranks, 132);
      REQUIRE(plan.ok());
      REQUIRE(plan->area_bytes <= prepared->area_bytes);
      REQUIRE(plan->panels.num_flags() <= kFlagsPerBank);
      REQUIRE((plan->plan.compute_ctas >= 1 && plan->num_push_ctas <= plan->plan.compute_ctas));
      if (call.num_sequences == 0) continue;
      REQUIRE(static_cast<int64_t>(plan->panels.area_bytes()) <= plan->area_bytes);
      REQUIRE(plan->packed.table_offset >= 132 * PACKED_MAP_BYTES);
    }
  }
}

TEST_CASE("more sequences than the table has room for are refused in words") {
  RingAttentionCall call;
  call.op = MK_OPERATOR_RING_ATTENTION;
  call.batch = call.heads = call.kv_heads = 1;
  call.seq = 10;
  call.dim = 64;
  const auto most = static_cast<int>((STAGING_BYTES - PACKED_MAP_BYTES) / 4 / 3) - 1;  // one CTA, 3 ranks
  call.num_sequences = most;
  CHECK(ring_attention_plan(call, 0, 3, 1).ok());
  ++call.num_sequences;
  const auto refused = ring_attention_plan(call, 0, 3, 1);
  REQUIRE(!refused.ok());
  CHECK(refused.status().sentence().find("num_sequences: at most " + std::to_string(most)) !=
        std::string::npos);
}

TEST_CASE("entries of cu_seqlens are looked at one by one") {
  std::mt19937_64 random(7);
  for (int round = 0; round < 2000; ++round) {
    const int num_sequences = 1 + static_cast<int>(random() % 4);
    RingAttentionCall call;
    call.seq = static_cast<int64_t>(random() % 4);
    call.num_sequences = num_sequences;
    std::vector<int32_t> entries;
    for (int i = 0; i <= num_sequences; ++i) entries.push_back(static_cast<int32_t>(random() % 5) - 1);
    if (random() % 2 == 0) {
      std::sort(entries.begin(), entries.end());
      entries.front() = 0, entries.back() = static_cast<int32_t>(call.seq);
    }
    call.cu_seqlens = entries.data();
    const bool good =
        entries.front() == 0 && std::is_sorted(entries.begin(), entries.end()) && entries.back() == call.seq;
    REQUIRE((cu_seqlens_problem(call).empty()) == good);
  }
  // Order and value count.
  CHECK(hash_of_entry(0, 1) + hash_of_entry(1, 2) != hash_of_entry(0, 2) + hash_of_entry(1, 1));
  CHECK(hash_of_entry(3, 1) != hash_of_entry(3, 2));
}
