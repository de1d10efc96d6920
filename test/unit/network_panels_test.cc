// SPDX-License-Identifier: MIT
// Ring attention between nodes on GPUs: who sends which blocks to whom, that every block that is needed arrives
// once and no other, and where; what the plan says of it.
#include "kernels/ops/ring_attention/network_panels.h"

#include <map>
#include <random>
#include <set>
#include <tuple>
#include <vector>

#include "kernels/cuda/ring_attention_plan.h"
#include "kernels/topology_arrays.h"
#include "test/support/catch.h"
#include "transport/command.h"

using namespace mk;
using namespace mk::ring_attention;

namespace {

constexpr int NUM_SMS = 132;

using Nodes = std::vector<int32_t>;
const std::vector<Nodes> LAYOUTS = {
    {0, 1},       {0, 0, 1, 1},       {0, 1, 0, 1},          {0, 1, 2, 3},
    {0, 0, 0, 1}, {0, 0, 1, 1, 2, 2}, {0, 0, 0, 1, 1, 1, 1}, {0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3}};

RingAttentionCall make_call(int64_t seq, mk_causal_t causal) {
  RingAttentionCall call;
  call.op = MK_OPERATOR_RING_ATTENTION;
  call.batch = 2;
  call.seq = seq;
  call.heads = 6;
  call.kv_heads = 3;
  call.dim = 128;
  call.causal = causal;
  return call;
}

Result<RingAttentionPlan> planned(const RingAttentionCall& call, const Nodes& nodes, int rank,
                                  int num_sms = NUM_SMS) {
  const auto nranks = static_cast<int>(nodes.size());
  const TopologyArrays arrays(Topology::make(rank, std::vector<std::string>(nodes.size(), "host"), nodes));
  return ring_attention_plan(call, rank, nranks, num_sms, &arrays.view());
}

// Source, key head, run, block.
using Block = std::tuple<int, int, int, int>;

// What all ranks together do in a launch.
struct Exchange {
  std::vector<std::map<Block, int>> arrivals;  // of each rank: how often a block comes there
  std::vector<int64_t> link_bytes, network_bytes;

  explicit Exchange(size_t nranks) : arrivals(nranks), link_bytes(nranks), network_bytes(nranks) {}
};

void push_own(const NetworkPanels& panels, const CudaSlices& slices, const NodeRanks& where, int rank,
              int nranks, Exchange* all) {
  for (int index = 0; index < panels.num_units(); ++index) {
    const PanelUnit unit = panel_unit(panels, slices, rank, panels.block_n, index);
    for (int peer = 0; peer < nranks; ++peer) {
      if (!is_in(panels.needed_by[unit.run][rank] & where.own, peer)) continue;
      for (int i = 0; i < unit.num_blocks; ++i) {
        ++all->arrivals[static_cast<size_t>(peer)][{rank, unit.head, unit.run, unit.block + i}];
        all->link_bytes[static_cast<size_t>(rank)] += panels.block_bytes();
      }
    }
  }
}

// To the rail peers; the blocks of each put lie where it does.
void put_own(const NetworkPanels& panels, const NodeRanks& where, const RankOrder& order, int rank,
             Exchange* all) {
  for (int index = 0; index < panels.num_puts(); ++index) {
    const KeyPut put = panels.put(rank, index);
    for (int i = 0; i < order.num_rail_peers; ++i) {
      if (!panels.enters(put, rank, where.of_rail[i])) continue;
      size_t place = panels.offset(rank, put.head, put.run, put.block);
      const size_t end = place + panels.put_bytes(put);
      for (int head = put.head; head < put.head + put.num_heads; ++head) {
        for (int block = put.block; block < put.block + put.num_blocks; ++block) {
          REQUIRE(panels.offset(rank, head, put.run, block) == place);
          place += static_cast<size_t>(panels.block_bytes());
          ++all->arrivals[order.rail_peers[i]][{rank, head, put.run, block}];
        }
      }
      REQUIRE(place == end);
      all->network_bytes[static_cast<size_t>(rank)] += static_cast<int64_t>(panels.put_bytes(put));
    }
  }
}

void forward_relayed(const NetworkPanels& panels, const NodeRanks& where, const RankOrder& order, int rank,
                     const Exchange& before, Exchange* all) {
  const ForwardBlocks forwards(panels, order);
  for (int index = 0; index < forwards.size(); ++index) {
    ForwardBlock block;
    if (!forwards.at(index, &block)) continue;
    const RankSet receivers = panels.needed_by[block.run][block.source] & where.own & ~(RankSet{1} << rank);
    const Block key = {block.source, block.head, block.run, block.block};
    for (int step = 1; step < order.num_local; ++step) {
      const int peer = order.rank_at[step];
      if (!is_in(receivers, peer)) continue;
      REQUIRE(before.arrivals[static_cast<size_t>(rank)].count(key) == 1);
      ++all->arrivals[static_cast<size_t>(peer)][key];
      all->link_bytes[static_cast<size_t>(rank)] += panels.block_bytes();
    }
  }
}

// Does a query of `receiver` see a key of the block?
bool sees_block(const NetworkPanels& panels, int receiver, int source, int run, int block) {
  const int begin = panels.slices.begin(source, run) + block * panels.block_n;
  const int end =
      std::min(begin + panels.block_n, panels.slices.begin(source, run) + panels.slices.count(source, run));
  return sees_some(panels.slices, receiver, begin, end);
}

void check_exchange(const RingAttentionCall& call, const Nodes& nodes) {
  const size_t nranks = nodes.size();
  std::vector<RingAttentionPlan> plans;
  Exchange all(nranks);
  const auto each_rank = [&](auto&& step) {
    for (size_t rank = 0; rank < nranks; ++rank) {
      const TopologyArrays arrays(
          Topology::make(static_cast<int>(rank), std::vector<std::string>(nranks, "host"), nodes));
      step(static_cast<int>(rank), make_rank_order(arrays.view()));
    }
  };
  each_rank([&](int rank, const RankOrder&) {
    auto plan = planned(call, nodes, rank);
    REQUIRE(plan.ok());
    plans.push_back(plan.value());
    REQUIRE(plan->network.num_signals() == plans[0].network.num_signals());
    REQUIRE(plan->area_bytes == plans[0].area_bytes);
  });
  const NetworkPanels& panels = plans[0].network;
  each_rank([&](int rank, const RankOrder& order) {
    const RingAttentionPlan& plan = plans[static_cast<size_t>(rank)];
    push_own(panels, panels.slices, plan.nodes, rank, static_cast<int>(nranks), &all);
    put_own(panels, plan.nodes, order, rank, &all);
  });
  const Exchange before = all;
  each_rank([&](int rank, const RankOrder& order) {
    forward_relayed(panels, plans[static_cast<size_t>(rank)].nodes, order, rank, before, &all);
  });
  each_rank([&](int rank, const RankOrder& order) {
    const auto& came = all.arrivals[static_cast<size_t>(rank)];
    size_t num_expected = 0;
    for (int source = 0; source < static_cast<int>(nranks); ++source) {
      if (source == rank) continue;
      const bool relays = std::find(order.relayed, order.relayed + order.num_relayed, source) !=
                          order.relayed + order.num_relayed;
      for (int run = 0; run < panels.num_runs; ++run) {
        for (int block = 0; block < panels.num_blocks(source, run); ++block) {
          bool is_expected = sees_block(panels, rank, source, run, block);
          // A relay takes what any rank of its node needs.
          for (int other = 0; other < static_cast<int>(nranks) && relays; ++other) {
            if (nodes[static_cast<size_t>(other)] == nodes[static_cast<size_t>(rank)])
              is_expected = is_expected || sees_block(panels, other, source, run, block);
          }
          for (int head = 0; head < panels.num_heads && is_expected; ++head, ++num_expected) {
            const auto found = came.find({source, head, run, block});
            REQUIRE(found != came.end());
            REQUIRE(found->second == 1);
          }
        }
      }
    }
    REQUIRE(came.size() == num_expected);
    REQUIRE(plans[static_cast<size_t>(rank)].plan.link_bytes == all.link_bytes[static_cast<size_t>(rank)]);
    REQUIRE(plans[static_cast<size_t>(rank)].plan.network_bytes ==
            all.network_bytes[static_cast<size_t>(rank)]);
  });
}

}  // namespace

TEST_CASE("every block that is needed arrives once, by one way, and no other does") {
  for (const Nodes& nodes : LAYOUTS) {
    for (const mk_causal_t causal : {MK_CAUSAL_NONE, MK_CAUSAL_CONTIGUOUS, MK_CAUSAL_ZIGZAG}) {
      for (const int64_t seq : {0, 1, 5, 130, 1030, 5000, 9000}) {  // 1030: the last of four has a block less
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

TEST_CASE("a rank needs all panels of another's run or none") {
  std::mt19937 random(2);
  for (int turn = 0; turn < 300; ++turn) {
    const int nranks = 2 + static_cast<int>(random() % 7);
    const int seq = 1 + static_cast<int>(random() % 600);
    const int mode = static_cast<int>(random() % 3);
    const int num_slices = mode == 2 ? 2 * nranks : nranks;
    const CudaSlices slices = {seq, nranks, (seq + num_slices - 1) / num_slices, mode > 0, mode == 2};
    NetworkPanels panels{};
    set_needs(slices, &panels);
    for (int source = 0; source < nranks; ++source) {
      for (int run = 0; run < slices.num_runs(); ++run) {
        for (int i = 0; i < slices.count(source, run); ++i) {
          const int position = slices.begin(source, run) + i;
          for (int rank = 0; rank < nranks; ++rank) {
            const bool needs = rank != source && sees_some(slices, rank, position, position + 1);
            if (is_in(panels.needed_by[run][source], rank) != needs) FAIL("rank " << rank);
          }
        }
      }
    }
  }
}

TEST_CASE("places, flags and signals are each one's own") {
  for (const mk_causal_t causal : {MK_CAUSAL_NONE, MK_CAUSAL_ZIGZAG}) {
    for (const int64_t seq : {100, 1000, 4000}) {
      RingAttentionCall call = make_call(seq, causal);
      call.tuning.chunk_bytes = seq == 4000 ? 1 : 0;
      auto plan = planned(call, {0, 0, 1, 1, 2}, 1);
      REQUIRE(plan.ok());
      const NetworkPanels& panels = plan->network;
      std::set<size_t> places;
      std::set<int> flags, signals;
      for (int source = 0; source < 5; ++source) {
        std::set<int> flags_of_puts;
        for (int run = 0; run < panels.num_runs; ++run) {
          for (int head = 0; head < panels.num_heads; ++head) {
            for (int block = 0; block < panels.num_blocks(source, run); ++block) {
              const size_t place = panels.offset(source, head, run, block);
              REQUIRE(places.insert(place).second);
              REQUIRE(place % static_cast<size_t>(panels.block_bytes()) == 0);
              REQUIRE(place + static_cast<size_t>(panels.block_bytes()) <= panels.area_bytes());
            }
            for (int panel = 0; panel < panels.run_panels; ++panel) {
              const int flag = panels.flag(source, head, run, panel);
              REQUIRE((flags.insert(flag).second && flag >= 0 && flag < panels.num_flags()));
              // As the forwarding CTAs take it apart.
              REQUIRE(flag / panels.num_units() == source);
              REQUIRE(flag / panels.run_panels % panels.num_runs == run);
              REQUIRE(flag % panels.run_panels == panel);
            }
          }
        }
        for (int put = 0; put < panels.num_puts(); ++put) {
          const int signal = panels.signal(source, put);
          REQUIRE((signals.insert(signal).second && signal >= kEntrySignals));
          REQUIRE(signal < static_cast<int>(kSignalsPerBank));
        }
      }
      REQUIRE(static_cast<int64_t>(panels.area_bytes()) <= plan->area_bytes);
    }
  }
}

TEST_CASE("puts are large where there is enough, and never so many that signals run out") {
  RingAttentionCall call = make_call(98304, MK_CAUSAL_NONE);
  call.batch = 4, call.heads = call.kv_heads = 16;
  auto large = planned(call, {0, 0, 1, 1}, 0);
  REQUIRE(large.ok());
  const size_t bytes = large->network.put_bytes(large->network.put(0, 0));
  CHECK((bytes >= 512 << 10 && bytes <= 2 << 20));
  // Short runs: several heads together.
  call.seq = 2048;
  auto joined = planned(call, {0, 0, 1, 1}, 0);
  REQUIRE(joined.ok());
  CHECK(joined->network.put_heads == 2);
  CHECK(joined->network.put_bytes(joined->network.put(0, 0)) == 512 << 10);
  // Far more puts wanted than there are signals.
  call.seq = 65536;
  call.batch = 60;
  call.tuning.chunk_bytes = 1;
  auto many = planned(call, {0, 0, 1, 1}, 0);
  REQUIRE(many.ok());
  CHECK(many->network.num_signals() <= kSignalsPerBank - kEntrySignals);
  CHECK(many->network.num_flags() <= kFlagsPerBank);
}

TEST_CASE("CTAs of a launch between nodes, and arenas that serve smaller calls") {
  const Nodes nodes = {0, 0, 1, 1};
  RingAttentionCall maxima = make_call(20000, MK_CAUSAL_NONE);
  auto prepared = planned(maxima, nodes, 0);
  REQUIRE(prepared.ok());
  std::mt19937 random(3);
  for (int turn = 0; turn < 300; ++turn) {
    RingAttentionCall call = maxima;
    call.seq = static_cast<int64_t>(random() % 20001);
    call.batch = 1 + static_cast<int64_t>(random() % 2);
    call.kv_heads = 1 + 2 * static_cast<int>(random() % 2);
    call.dim = 8 * (1 + static_cast<int>(random() % 16));
    call.causal = static_cast<mk_causal_t>(random() % 3);
    const int num_sms = 3 + static_cast<int>(random() % 130);
    auto plan = planned(call, nodes, static_cast<int>(random() % 4), num_sms);
    REQUIRE(plan.ok());
    REQUIRE(plan->area_bytes <= prepared->area_bytes);
    REQUIRE(static_cast<int64_t>(plan->network.area_bytes()) <= plan->area_bytes);
    REQUIRE(plan->plan.compute_ctas >= 1);
    REQUIRE(plan->num_push_ctas <= plan->plan.compute_ctas);
    REQUIRE(plan->plan.compute_ctas + plan->num_forward_ctas + 1 <= num_sms);
    REQUIRE(plan->plan.send_ctas == 1);
    REQUIRE(plan->plan.receive_ctas == plan->num_forward_ctas);
  }
  // Nobody to forward to.
  auto apart = planned(maxima, {0, 1, 2, 3}, 0);
  REQUIRE(apart.ok());
  CHECK(apart->num_forward_ctas == 0);
}

TEST_CASE("causal tiles stay in turn where keys come over the network, later than inside a node") {
  RingAttentionCall call = make_call(16384, MK_CAUSAL_ZIGZAG);
  call.batch = 1;
  call.heads = call.kv_heads = 8;
  auto inside = ring_attention_plan(call, 0, 2, NUM_SMS);
  auto between = planned(call, {0, 1}, 0);
  REQUIRE((inside.ok() && between.ok()));
  CHECK(inside->tiles.joint_heads == 8);
  CHECK(between->tiles.joint_heads < 8);
}

TEST_CASE("what cannot run between nodes is refused in words") {
  const auto sentence = [](const RingAttentionCall& call, int num_sms) {
    auto plan = planned(call, {0, 0, 1, 1}, 0, num_sms);
    REQUIRE(!plan.ok());
    CHECK(plan.status().code() == MK_ERROR_UNSUPPORTED);
    return plan.status().sentence();
  };
  RingAttentionCall call = make_call(1000, MK_CAUSAL_NONE);
  CHECK(sentence(call, 2).find("needs 3 CTAs") != std::string::npos);
  call.batch = 1 << 17;
  CHECK(sentence(call, NUM_SMS).find("flags") != std::string::npos);
  call = make_call(int64_t{1} << 29, MK_CAUSAL_NONE);
  call.batch = 10000;
  CHECK(sentence(call, NUM_SMS).find("use several calls") != std::string::npos);
}
