// SPDX-License-Identifier: MIT
// Gradients of ring attention between nodes on GPUs: that every rank's part of every tile of keys comes to the
// keys' owner, once, by which way, and where; what the plan says of it.
#include "kernels/ops/ring_attention_backward/network_parts.h"

#include <algorithm>
#include <deque>
#include <map>
#include <random>
#include <set>
#include <tuple>
#include <vector>

#include "kernels/cuda/ring_attention_backward_plan.h"
#include "kernels/topology_arrays.h"
#include "key_turns.h"
#include "part_exchange.h"
#include "test/support/catch.h"
#include "transport/command.h"

using namespace mk;
using namespace mk::ring_attention;
using namespace mk::ring_attention_backward;
using namespace mk::test;

namespace {

constexpr int NUM_SMS = 132;

using Nodes = std::vector<int32_t>;
const std::vector<Nodes> LAYOUTS = {
    {0, 1},       {0, 0, 1, 1},       {0, 1, 0, 1},          {0, 1, 2, 3},
    {0, 0, 0, 1}, {0, 0, 1, 1, 2, 2}, {0, 0, 0, 1, 1, 1, 1}, {0, 1, 1, 2, 2, 2, 3, 3}};

RingAttentionCall make_call(int64_t seq, mk_causal_t causal) {
  RingAttentionCall call;
  call.op = MK_OPERATOR_RING_ATTENTION_BACKWARD;
  call.batch = 2;
  call.seq = seq;
  call.heads = 6;
  call.kv_heads = 3;
  call.dim = 128;
  call.causal = causal;
  return call;
}

// A rank's view of who is where, and its plan.
struct Member {
  static constexpr bool HAS_GAPS = false;
  TopologyArrays arrays;
  RankOrder order;
  RingAttentionBackwardPlan plan;
  PartRoutes routes;

  Member(const RingAttentionCall& call, const Nodes& nodes, int rank)
      : arrays(Topology::make(rank, std::vector<std::string>(nodes.size(), "host"), nodes)),
        order(make_rank_order(arrays.view())) {
    auto made =
        ring_attention_backward_plan(call, rank, static_cast<int>(nodes.size()), NUM_SMS, &arrays.view());
    REQUIRE(made.ok());
    plan = made.take();
    routes = plan.routes;
  }
  const NetworkGradientPanels& panels() const { return plan.network; }
  bool has_some(const KeyTile&) const { return true; }  // there are no others
  int parts_of_panel(const KeyTile& tile, int panel) const {
    const int first = panel * panels().panel_tiles();
    return std::min(panels().panel_tiles(), key_tiles().seen_tiles_of(tile.step, tile.run) - first);
  }
  bool is_owed(int source, const KeyTile& tile) const {
    return tile.index < seen_tiles(plan.tiles.slices, source, order.rank_at[0], tile.run);
  }
  KeyTilesOf<FarRanksFirst> key_tiles() const {
    return {plan.tiles.slices,
            {{order.rank_at}},
            plan.network.num_heads,
            plan.network.heads_at_once(plan.tiles.slices.causal)};
  }
};

std::deque<Member> make_members(const RingAttentionCall& call, const Nodes& nodes) {
  std::deque<Member> members;
  for (size_t rank = 0; rank < nodes.size(); ++rank) members.emplace_back(call, nodes, static_cast<int>(rank));
  return members;
}

void check_exchange(const RingAttentionCall& call, const Nodes& nodes) {
  const std::deque<Member> members = make_members(call, nodes);
  std::vector<Area> areas(nodes.size());
  std::set<std::pair<int, int>> signals;
  std::vector<int64_t> link(nodes.size()), network(nodes.size());
  for (size_t rank = 0; rank < nodes.size(); ++rank) store_own(members[rank], &areas, &link[rank]);
  for (size_t rank = 0; rank < nodes.size(); ++rank)
    put_relayed(members[rank], &areas, &signals, &network[rank]);
  for (size_t rank = 0; rank < nodes.size(); ++rank) {
    const RingAttentionBackwardPlan& plan = members[rank].plan;
    check_owner(members[rank], areas[rank]);
    check_signals(members[rank], members[rank].order.num_local, signals);
    REQUIRE(plan.area_bytes == members[0].plan.area_bytes);
    REQUIRE(static_cast<int64_t>(plan.network.area_bytes()) <= plan.area_bytes);
    REQUIRE(plan.network.num_flags() <= kFlagsPerBank);
    REQUIRE(plan.network.panel_blocks % TILE_BLOCKS == 0);
    // Beside keys and values, which travel as forward.
    int num_sms = NUM_SMS;
    auto keys = plan_network(call, members[rank].arrays.view(), plan.network, &num_sms);
    REQUIRE(keys.ok());
    REQUIRE(plan.plan.link_bytes == keys->link_bytes + link[rank]);
    REQUIRE(plan.plan.network_bytes == keys->network_bytes + network[rank]);
  }
}

}  // namespace

TEST_CASE("every rank's part comes to the owner of the keys, once, and nothing else does") {
  for (const Nodes& nodes : LAYOUTS) {
    for (const mk_causal_t causal : {MK_CAUSAL_NONE, MK_CAUSAL_CONTIGUOUS, MK_CAUSAL_ZIGZAG}) {
      for (const int64_t seq : {0, 1, 5, 130, 1030, 5000}) {  // 1030: the last of four has a block less
        for (const int64_t put_bytes : {0, 1, 100000, 300000}) {
          RingAttentionCall call = make_call(seq, causal);
          call.dim = seq % 4 == 1 ? 64 : 128;
          call.tuning.chunk_bytes = put_bytes;
          INFO(nodes.size() << " ranks, causal " << causal << ", seq " << seq << ", puts of " << put_bytes);
          check_exchange(call, nodes);
        }
      }
    }
  }
}

TEST_CASE("tiles of keys are those of one node, the farthest ranks' first and the own last") {
  for (const Nodes& nodes : LAYOUTS) {
    for (const mk_causal_t causal : {MK_CAUSAL_NONE, MK_CAUSAL_CONTIGUOUS, MK_CAUSAL_ZIGZAG}) {
      const RingAttentionCall call = make_call(1500, causal);
      for (const Member& member : make_members(call, nodes)) {
        const auto tiles = member.key_tiles();
        const KeyTiles& in_node = member.plan.key_tiles;
        std::set<std::tuple<int, int, int, int>> expected, seen;
        for (int index = 0; index < in_node.size(); ++index) {
          const KeyTile tile = in_node.at(index);
          expected.emplace(in_node.source(tile.step), tile.head, tile.run, tile.index);
        }
        int step = tiles.slices.nranks;
        for (int index = 0; index < tiles.size(); ++index) {
          const KeyTile tile = tiles.at(index);
          REQUIRE(tile.step <= step);
          step = tile.step;
          REQUIRE(tile.position ==
                  tiles.slices.begin(tiles.source(tile.step), tile.run) + tile.index * TILE_ROWS);
          REQUIRE(seen.emplace(tiles.source(tile.step), tile.head, tile.run, tile.index).second);
        }
        REQUIRE(tiles.source(0) == member.order.rank_at[0]);
        REQUIRE(seen == expected);
        REQUIRE(member.plan.num_key_tiles == tiles.size());
      }
    }
  }
}

TEST_CASE("between nodes, too, tiles have turns in the order in which they are handed out") {
  for (const Nodes& nodes : LAYOUTS) {
    for (const mk_causal_t causal : {MK_CAUSAL_NONE, MK_CAUSAL_CONTIGUOUS, MK_CAUSAL_ZIGZAG}) {
      for (const int64_t seq : {5, 1500, 2030}) {
        const RingAttentionCall call = make_call(seq, causal);
        for (const Member& member : make_members(call, nodes)) {
          auto tiles = member.key_tiles();
          for (const int heads : {1, 2, 6}) {
            tiles.heads_at_once = heads;
            check_turns(tiles, member.order.rank_at[0]);
          }
        }
      }
    }
  }
}

TEST_CASE("rows of queries lie behind all slots") {
  for (const Member& member : make_members(make_call(1500, MK_CAUSAL_ZIGZAG), {0, 0, 0, 1})) {
    const NetworkGradientPanels& panels = member.plan.network;
    const QueryRowPlaces places = member.plan.row_places();
    REQUIRE(places.begin == panels.NetworkPanels::area_bytes() + panels.num_slots * panels.slot_bytes());
    REQUIRE(places.end() == panels.query_sums().begin);
    REQUIRE(panels.query_sums().end() == panels.area_bytes());
    std::set<size_t> seen;
    for (int head = 0; head < panels.num_query_heads; ++head) {
      for (int run = 0; run < panels.num_runs; ++run) {
        for (int block = 0; block < panels.run_blocks; ++block) {
          const size_t place = places.offset(head, run, block);
          REQUIRE(place == panels.rows(head, run, block));
          REQUIRE((place % 16 == 0 && place >= places.begin && place + places.BLOCK_BYTES <= places.end()));
          REQUIRE(seen.insert(place).second);
        }
      }
    }
  }
}

TEST_CASE("CTAs of gradients between nodes, and arenas that serve smaller calls") {
  const Nodes nodes = {0, 0, 1, 1};
  const auto planned = [&](const RingAttentionCall& call, int rank, int num_sms) {
    const TopologyArrays arrays(Topology::make(rank, std::vector<std::string>(nodes.size(), "host"), nodes));
    return ring_attention_backward_plan(call, rank, 4, num_sms, &arrays.view());
  };
  const RingAttentionCall maxima = make_call(20000, MK_CAUSAL_NONE);
  auto prepared = planned(maxima, 0, NUM_SMS);
  REQUIRE(prepared.ok());
  std::mt19937 random(3);
  for (int turn = 0; turn < 200; ++turn) {
    RingAttentionCall call = maxima;
    call.seq = static_cast<int64_t>(random() % 20001);
    call.batch = 1 + static_cast<int64_t>(random() % 2);
    call.kv_heads = 1 + 2 * static_cast<int>(random() % 2);
    call.dim = 8 * (1 + static_cast<int>(random() % 16));
    call.causal = static_cast<mk_causal_t>(random() % 3);
    const int num_sms = 3 + static_cast<int>(random() % 130);
    auto plan = planned(call, static_cast<int>(random() % 4), num_sms);
    REQUIRE(plan.ok());
    REQUIRE(plan->area_bytes <= prepared->area_bytes);
    REQUIRE(static_cast<int64_t>(plan->network.area_bytes()) <= plan->area_bytes);
    REQUIRE(plan->plan.compute_ctas >= 1);
    REQUIRE(plan->num_push_ctas <= plan->plan.compute_ctas);
    REQUIRE(plan->plan.compute_ctas + plan->num_forward_ctas + 1 <= num_sms);
    REQUIRE((plan->plan.send_ctas == 1 && plan->plan.receive_ctas == plan->num_forward_ctas));
  }
  const auto sentence = [&](const RingAttentionCall& call, int num_sms) {
    auto plan = planned(call, 0, num_sms);
    REQUIRE(!plan.ok());
    CHECK(plan.status().code() == MK_ERROR_UNSUPPORTED);
    return plan.status().sentence();
  };
  RingAttentionCall call = make_call(1000, MK_CAUSAL_NONE);
  CHECK(sentence(call, 2).find("needs 3 CTAs") != std::string::npos);
  // The header's limit: batch * kv_heads * (3W-L-1).
  call.batch = kFlagsPerBank / (3 * 9);
  CHECK(planned(call, 0, NUM_SMS).ok());
  ++call.batch;
  CHECK(sentence(call, NUM_SMS).find("flags") != std::string::npos);
  call = make_call(int64_t{1} << 27, MK_CAUSAL_NONE);
  call.batch = 8000;
  CHECK(sentence(call, NUM_SMS).find("use several calls") != std::string::npos);
}

TEST_CASE("there are flags and signals for the most panels and puts of gradients") {
  RingAttentionCall call = make_call(65536, MK_CAUSAL_NONE);
  call.batch = 1000;
  call.tuning.chunk_bytes = 1;
  for (const Nodes& nodes : LAYOUTS) {
    const Member member(call, nodes, 0);
    CHECK(member.plan.network.num_signals() <= kSignalsPerBank - kEntrySignals);
    CHECK(member.plan.network.num_flags() <= kFlagsPerBank);
  }
}
