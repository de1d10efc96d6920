// SPDX-License-Identifier: MIT
// Gradients of ring attention over packed sequences between nodes on GPUs: that every rank's part of every tile
// of keys that it sees comes to the keys' owner, once; what the plan says of it.
#include <algorithm>
#include <deque>
#include <random>
#include <set>
#include <tuple>
#include <vector>

#include "kernels/cuda/ring_attention_backward_plan.h"
#include "kernels/ops/ring_attention_backward/packed_blocks.h"
#include "packed_cut.h"
#include "packed_needs.h"
#include "part_exchange.h"
#include "test/support/catch.h"
#include "transport/command.h"

using namespace mk;
using namespace mk::ring_attention_backward;
using namespace mk::test;

namespace {

constexpr int NUM_SMS = 132;

struct Member {
  static constexpr bool HAS_GAPS = true;
  PackedRankView<PackedNetworkGradientPanels> view;
  const RankOrder& order;
  PartRoutes routes;

  Member(const PackedNetworkGradientPanels& common, const Nodes& nodes, int rank)
      : view(common, nodes, rank),
        order(view.order),
        routes(make_part_routes(topology_of(nodes, rank).view())) {}
  Member(const Member&) = delete;

  const PackedNetworkGradientPanels& panels() const { return view.panels; }
  PackedKeyTilesOf<FarRanksFirst> key_tiles() const {
    return {panels().slices, {{order.rank_at}}, panels().num_heads, 2};
  }
  bool has_some(const KeyTile& tile) const { return key_tiles().is_seen(tile); }
  int parts_of_panel(const KeyTile& tile, int panel) const {
    return key_tiles().seen_among(tile.step, panel * panels().panel_tiles(), panels().panel_tiles());
  }
  bool is_owed(int source, const KeyTile& tile) const {
    return sees_some(panels().slices, source, order.rank_at[0], PackedKeyTiles::rows_of(tile));
  }
};

Nodes random_nodes(const PackedCut& cut) {
  const int nranks = cut.slices.nranks, num_nodes = 2 + cut.below(2);
  Nodes nodes;
  for (int rank = 0; rank < nranks; ++rank) nodes.push_back(rank < num_nodes ? rank : cut.below(num_nodes));
  std::shuffle(nodes.begin(), nodes.end(), cut.random);
  return nodes;
}

RingAttentionCall backward_of(const PackedCut& cut) {
  RingAttentionCall call = cut.call;
  call.op = MK_OPERATOR_RING_ATTENTION_BACKWARD;
  call.kv_heads = 1 + cut.below(3);
  call.heads = 2 * call.kv_heads;
  call.dim = cut.below(2) == 0 ? 64 : 128;
  call.tuning.chunk_bytes = std::vector<int64_t>{0, 1, 100000, 300000}[static_cast<size_t>(cut.below(4))];
  return call;
}

void check_exchange(const PackedCut& cut, const RingAttentionCall& call, const Nodes& nodes) {
  std::deque<Member> members;
  int64_t area_bytes = 0;
  for (int rank = 0; rank < cut.slices.nranks; ++rank) {
    auto plan =
        ring_attention_backward_plan(call, rank, cut.slices.nranks, NUM_SMS, &topology_of(nodes, rank).view());
    REQUIRE(plan.ok());
    PackedNetworkGradientPanels panels = plan->packed_network;
    panels.slices = cut.slices;
    members.emplace_back(panels, nodes, rank);
    REQUIRE(panels.own == members.back().view.nodes.own);
    REQUIRE((rank == 0 || plan->area_bytes == area_bytes));
    area_bytes = plan->area_bytes;
    REQUIRE(static_cast<int64_t>(panels.area_bytes()) <= area_bytes);
    REQUIRE((panels.panel_blocks % TILE_BLOCKS == 0 && panels.num_flags() <= kFlagsPerBank));
    REQUIRE(plan->row_places().begin == panels.row_places().begin);
  }
  std::vector<Area> areas(nodes.size());
  std::set<std::pair<int, int>> signals;
  int64_t link = 0, network = 0;
  for (const Member& member : members) store_own(member, &areas, &link);
  for (const Member& member : members) put_relayed(member, &areas, &signals, &network);
  for (const Member& member : members) {
    check_owner(member, areas[member.order.rank_at[0]]);
    check_signals(member, member.order.num_local, signals);
  }
}

}  // namespace

TEST_CASE("every part of packed keys comes to their owner, once, and no put is waited for in vain") {
  std::mt19937_64 random(21);
  for (int round = 0; round < 600; ++round) {
    const PackedCut cut(random, round % 3 == 0 ? 9000 : 2500);
    if (cut.slices.nranks < 2) continue;
    const Nodes nodes = random_nodes(cut);
    const RingAttentionCall call = backward_of(cut);
    INFO("round " << round << ": " << cut.slices.nranks << " ranks, causal " << call.causal << ", seq "
                  << call.seq << ", " << call.num_sequences << " sequences");
    check_exchange(cut, call, nodes);
  }
}

TEST_CASE("tiles of packed keys between nodes are those of one node, the farthest ranks' first") {
  std::mt19937_64 random(22);
  for (int round = 0; round < 150; ++round) {
    const PackedCut cut(random, 2500);
    const int nranks = cut.slices.nranks, rank = cut.below(nranks);
    if (nranks < 2) continue;
    const RankOrder order = make_rank_order(topology_of(random_nodes(cut), rank).view());
    const PackedKeyTilesOf<FarRanksFirst> tiles = {cut.slices, {{order.rank_at}}, 2, 2};
    const PackedKeyTiles in_node = {cut.slices, {{rank}}, 2, 2};
    std::set<std::tuple<int, int, int, bool>> expected, seen;
    for (int index = 0; index < in_node.size(); ++index) {
      const KeyTile tile = in_node.at(index);
      expected.emplace(in_node.source(tile.step), tile.head, tile.index, in_node.is_seen(tile));
    }
    for (int index = 0, step = nranks; index < tiles.size(); ++index) {
      const KeyTile tile = tiles.at(index);
      REQUIRE(tile.step <= step);
      step = tile.step;
      REQUIRE(seen.emplace(tiles.source(step), tile.head, tile.index, tiles.is_seen(tile)).second);
    }
    REQUIRE(tiles.source(0) == rank);
    REQUIRE((seen == expected && tiles.size() == in_node.size()));
  }
}

TEST_CASE("gradients of packed sequences between nodes: CTAs, limits, arenas that serve smaller calls") {
  RingAttentionCall maxima;
  maxima.op = MK_OPERATOR_RING_ATTENTION_BACKWARD;
  maxima.batch = 2;
  maxima.seq = 20000;
  maxima.heads = 8;
  maxima.kv_heads = 4;
  maxima.dim = 128;
  maxima.num_sequences = 40;
  std::mt19937_64 random(23);
  const auto below = [&](unsigned bound) { return static_cast<int>(random() % bound); };
  for (const Nodes& nodes : {Nodes{0, 1}, Nodes{0, 0, 1, 1}, Nodes{0, 0, 0, 1}, Nodes{0, 1, 2, 3}}) {
    const auto nranks = static_cast<int>(nodes.size());
    const auto planned = [&](const RingAttentionCall& call, int rank, int num_sms) {
      return ring_attention_backward_plan(call, rank, nranks, num_sms, &topology_of(nodes, rank).view());
    };
    auto prepared = planned(maxima, 0, NUM_SMS);
    REQUIRE(prepared.ok());
    for (int turn = 0; turn < 200; ++turn) {
      RingAttentionCall call = maxima;
      call.num_sequences = below(41);
      call.batch = call.num_sequences > 0 ? 1 : 1 + below(2);
      call.seq = turn % 3 == 0 ? below(40) : below(20001);
      call.kv_heads = 1 << below(3);
      call.dim = 8 * (1 + below(16));
      call.causal = static_cast<mk_causal_t>(below(3));
      call.tuning.chunk_bytes = turn % 2 == 0 ? 1 : 0;
      const int rank = below(static_cast<unsigned>(nranks)), num_sms = 3 + below(130);
      auto plan = planned(call, rank, num_sms);
      REQUIRE(plan.ok());
      REQUIRE(plan->area_bytes <= prepared->area_bytes);
      REQUIRE((plan->plan.compute_ctas >= 1 && plan->num_push_ctas <= plan->plan.compute_ctas));
      REQUIRE(plan->plan.compute_ctas + plan->num_forward_ctas + 1 <= num_sms);
      REQUIRE((plan->plan.send_ctas == 1 && plan->plan.receive_ctas == plan->num_forward_ctas));
      if (call.num_sequences == 0) continue;
      const PackedNetworkGradientPanels& panels = plan->packed_network;
      REQUIRE(static_cast<int64_t>(panels.area_bytes()) <= plan->area_bytes);
      REQUIRE(plan->row_places().end() == plan->query_sums().begin);
      REQUIRE(plan->query_sums().end() == panels.area_bytes());
      REQUIRE((panels.num_runs == 1 && panels.run_panels <= ring_attention::MOST_PANELS));
      REQUIRE(panels.run_blocks * BLOCK_ROWS >=
              ring_attention::packed_rows(call, nranks, call.causal == MK_CAUSAL_ZIGZAG));
      REQUIRE((panels.num_flags() <= kFlagsPerBank &&
               panels.num_slots == most_part_slots(topology_of(nodes, rank).view())));
      REQUIRE(panels.num_signals() <= kSignalsPerBank - kEntrySignals);
      REQUIRE(plan->packed.table_offset >= static_cast<size_t>(num_sms) * ring_attention::PACKED_MAP_BYTES);
      REQUIRE(plan->num_push_ctas >= 1);
      // Whatever cu_seqlens say, there is someone to forward.
      const RankOrder order = make_rank_order(topology_of(nodes, rank).view());
      REQUIRE((plan->num_forward_ctas > 0) == (order.num_local > 1 && order.num_relayed > 0));
    }
    const auto sentence = [&](const RingAttentionCall& call, int num_sms) {
      auto plan = planned(call, 0, num_sms);
      REQUIRE(!plan.ok());
      CHECK(plan.status().code() == MK_ERROR_UNSUPPORTED);
      return plan.status().sentence();
    };
    RingAttentionCall call = maxima;
    call.batch = 1;
    CHECK(sentence(call, 2).find("needs 3 CTAs") != std::string::npos);
    call.num_sequences = 1 << 30;
    CHECK(sentence(call, NUM_SMS).find("num_sequences: at most") != std::string::npos);
    // The header's limit, of one panel a head: batch * kv_heads * (flags of a panel).
    call.num_sequences = 1;
    call.seq = nranks;
    const int flags_a_panel = nranks + most_part_slots(topology_of(nodes, 0).view());
    call.heads = call.kv_heads = static_cast<int>(kFlagsPerBank) / flags_a_panel;
    CHECK(planned(call, 0, NUM_SMS).ok());
    ++call.kv_heads;
    CHECK(sentence(call, NUM_SMS).find("flags") != std::string::npos);
  }
}
