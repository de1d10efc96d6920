// SPDX-License-Identifier: MIT
// Ring attention over packed sequences between nodes on GPUs: that every block that a rank's queries see comes
// to it once, that whoever waits for a put or for its panels gets them; what the plan says of it.
#include "kernels/ops/ring_attention/packed_network_panels.h"

#include <algorithm>
#include <deque>
#include <map>
#include <random>
#include <tuple>
#include <vector>

#include "kernels/cuda/ring_attention_plan.h"
#include "packed_cut.h"
#include "packed_needs.h"
#include "test/support/catch.h"

using namespace mk;
using namespace mk::ring_attention;
using mk::test::Nodes;
using mk::test::PackedCut;
using mk::test::topology_of;

namespace {

using RankView = mk::test::PackedRankView<PackedNetworkPanels>;
// Source, key head, block.
using Block = std::tuple<int, int, int>;

struct Launch {
  std::deque<RankView> ranks;
  std::vector<std::map<Block, int>> arrivals;  // of each rank: how often a block comes there

  Launch(const PackedNetworkPanels& panels, const Nodes& nodes) : arrivals(nodes.size()) {
    for (int rank = 0; rank < static_cast<int>(nodes.size()); ++rank) ranks.emplace_back(panels, nodes, rank);
  }
  RankView& at(int rank) { return ranks[static_cast<size_t>(rank)]; }
  bool has(int rank, const Block& block) const { return arrivals[static_cast<size_t>(rank)].count(block) == 1; }
  void come(int rank, const Block& block) { ++arrivals[static_cast<size_t>(rank)][block]; }

  void push(int rank) {
    const PackedNetworkPanels& panels = at(rank).panels;
    for (int index = 0; index < panels.num_units(); ++index) {
      const PackedPanelUnit unit = panel_unit(panels, panels.slices, rank, panels.block_n, index);
      REQUIRE((unit.needed_by & ~panels.own) == 0);
      for (int peer = 0; peer < panels.nranks; ++peer) {
        for (int i = 0; i < unit.num_blocks && is_in(unit.needed_by, peer); ++i)
          come(peer, {rank, unit.head, unit.block + i});
      }
    }
  }
  // All of a put that there is has been pushed, and who is sent it waits for it.
  void put(int rank) {
    const RankView& view = at(rank);
    for (int index = 0; index < view.panels.num_puts(); ++index) {
      const KeyPut put = view.panels.put(rank, index);
      for (int i = 0; i < view.order.num_rail_peers; ++i) {
        const int peer = view.order.rail_peers[i];
        const RankView& other = at(peer);
        const bool relays = std::find(other.order.relayed, other.order.relayed + other.order.num_relayed,
                                      rank) != other.order.relayed + other.order.num_relayed;
        const bool is_sent = view.panels.enters(put, rank, view.nodes.of_rail[i]);
        REQUIRE((relays && is_sent == other.panels.enters(put, rank, other.nodes.own)));
        for (int head = put.head; is_sent && head < put.head + put.num_heads; ++head) {
          for (int block = put.block; block < put.block + put.num_blocks; ++block) {
            REQUIRE(has(rank, {rank, head, block}));
            come(peer, {rank, head, block});
          }
        }
      }
    }
  }
  void forward(int rank) {
    const RankView& view = at(rank);
    const ForwardBlocks forwards(view.panels, view.order);
    for (int index = 0; index < forwards.size(); ++index) {
      ForwardBlock block;
      if (!forwards.at(index, &block)) continue;
      const int panel = block.block / view.panels.panel_blocks;
      const RankSet receivers =
          view.panels.needs(block.source, 0, panel) & view.nodes.own & ~(RankSet{1} << rank);
      for (int peer = 0; peer < view.panels.nranks; ++peer) {
        if (!is_in(receivers, peer)) continue;
        REQUIRE(has(rank, {block.source, block.head, block.block}));
        come(peer, {block.source, block.head, block.block});
      }
    }
  }
};

}  // namespace

TEST_CASE("every block of packed keys that is seen arrives once, and no put is waited for in vain") {
  std::mt19937_64 random(11);
  for (int round = 0; round < 400; ++round) {
    const PackedCut cut(random, round % 4 == 0 ? 900 : 250);
    const int nranks = cut.slices.nranks, num_nodes = 2 + cut.below(2);
    if (nranks < 2) continue;
    Nodes nodes;
    for (int rank = 0; rank < nranks; ++rank) nodes.push_back(rank < num_nodes ? rank : cut.below(num_nodes));
    std::shuffle(nodes.begin(), nodes.end(), random);
    PackedNetworkPanels panels{};
    panels.block_n = 1 + cut.below(40);
    static_cast<KeyPanels&>(panels) =
        packed_panels(cut.call, nranks, cut.slices.zigzag, 64, panels.block_n, 1 + cut.below(3), 1);
    panels.num_heads = 1 + cut.below(3);
    panels.slices = cut.slices;
    panels.put_heads = 1 + cut.below(panels.num_heads);
    panels.put_panels = panels.put_heads > 1 ? panels.run_panels : 1 + cut.below(panels.run_panels);
    Launch launch(panels, nodes);
    for (int rank = 0; rank < nranks; ++rank) launch.push(rank);
    for (int rank = 0; rank < nranks; ++rank) launch.put(rank);
    for (int rank = 0; rank < nranks; ++rank) launch.forward(rank);
    for (int rank = 0; rank < nranks; ++rank) {
      for (int source = 0; source < nranks; ++source) {
        const int blocks = (cut.slices.rows(source) + panels.block_n - 1) / panels.block_n;
        for (int block = 0; source != rank && block < blocks; ++block) {
          const RowRange keys = {block * panels.block_n, (block + 1) * panels.block_n};
          if (!cut.sees_some(rank, {0, cut.slices.rows(rank)}, source, keys)) continue;
          for (int head = 0; head < panels.num_heads; ++head) {
            if (!launch.has(rank, {source, head, block}))
              FAIL("block " << block << " of rank " << source << " does not come to rank " << rank);
          }
        }
      }
      for (const auto& [block, count] : launch.arrivals[static_cast<size_t>(rank)]) REQUIRE(count == 1);
    }
  }
}

TEST_CASE("a launch over packed sequences between nodes: CTAs, panels, arenas that serve smaller calls") {
  RingAttentionCall maxima;
  maxima.op = MK_OPERATOR_RING_ATTENTION;
  maxima.batch = 2;
  maxima.seq = 20000;
  maxima.heads = 8;
  maxima.kv_heads = 4;
  maxima.dim = 128;
  maxima.num_sequences = 40;
  std::mt19937 random(12);
  const auto below = [&](unsigned bound) { return static_cast<int>(random() % bound); };
  for (const Nodes& nodes : {Nodes{0, 1}, Nodes{0, 0, 1, 1}, Nodes{0, 0, 0, 1}, Nodes{0, 1, 2, 3}}) {
    const auto nranks = static_cast<int>(nodes.size());
    const auto planned = [&](const RingAttentionCall& call, int rank, int num_sms) {
      return ring_attention_plan(call, rank, nranks, num_sms, &topology_of(nodes, rank).view());
    };
    auto prepared = planned(maxima, 0, 132);
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
      if (call.num_sequences == 0) continue;
      const PackedNetworkPanels& panels = plan->packed_network;
      REQUIRE(static_cast<int64_t>(panels.area_bytes()) <= plan->area_bytes);
      REQUIRE((panels.num_runs == 1 && panels.run_panels <= MOST_PANELS));
      REQUIRE(panels.run_blocks * panels.block_n >= packed_rows(call, nranks, call.causal == MK_CAUSAL_ZIGZAG));
      REQUIRE(panels.num_flags() <= kFlagsPerBank);
      REQUIRE(panels.num_signals() <= kSignalsPerBank - kEntrySignals);
      REQUIRE(plan->packed.table_offset >= static_cast<size_t>(num_sms) * PACKED_MAP_BYTES);
      REQUIRE((panels.own == plan->nodes.own && plan->num_push_ctas >= 1));
      // Whatever cu_seqlens say, there is someone to forward.
      const RankOrder order = make_rank_order(topology_of(nodes, rank).view());
      REQUIRE((plan->num_forward_ctas > 0) == (order.num_local > 1 && order.num_relayed > 0));
    }
  }
}
