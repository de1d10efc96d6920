// SPDX-License-Identifier: MIT
// MoE dispatch between nodes on GPUs, as far as it is functions of indices and counts: every token that another
// node needs is packed and put once, every row of it lands once and where it belongs, both sides cut lists
// alike, and flags, counts and signals do not overlap; and the plan.
#include <algorithm>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <tuple>
#include <vector>

#include "kernels/ops/moe_dispatch_gemm/network_schedule.h"
#include "kernels/ops/moe_routing/near_tiles.h"
#include "test/support/catch.h"
#include "test/unit/moe_network_job.h"

namespace {

using namespace mk;
using namespace mk::moe_dispatch_gemm;
using test::Item;
using test::TOPOLOGIES;
using Job = test::MoeNetworkJob;

MoeCall make_call(int experts, int topk) {
  return test::make_moe_call(MK_OPERATOR_MOE_DISPATCH_GEMM, experts, topk);
}

std::unique_ptr<Tables> tables_of(const Job& job, int rank) {
  auto tables = std::make_unique<Tables>();
  const moe::CudaRouting routing = job.routing(rank);
  for (int expert = 0; expert < job.experts; ++expert)
    count_expert(routing, job.counts(routing), 8, expert, *tables);
  for (uint32_t* sums : {tables->rows, tables->blocks, tables->own_rows, tables->units}) {
    uint32_t sum = 0;
    for (int i = 0; i < job.experts; ++i) sum += std::exchange(sums[i], sum);
    sums[job.experts] = sum;
  }
  return tables;
}

// The memory of packets that relays take in: what each chunk's put brings.
using Arrived =
    std::map<std::pair<int, int64_t>, std::pair<int, int64_t>>;  // (relay, packet) -> (source, item)

NetworkNumbers numbers_of(const Job& job) {
  return {job.nranks, job.nodes.num_nodes, 40, 7, max_forward_lists(job.view(0))};
}

void check_sent(const Job& job, const moe::PacketChunks& chunks, int num_split, Arrived& arrived) {
  const NetworkNumbers numbers = numbers_of(job);
  std::set<std::pair<int, int>> signals;  // at the relay
  for (int rank = 0; rank < job.nranks; ++rank) {
    const moe::CudaRouting routing = job.routing(rank);
    const moe::Counts counts = job.counts(routing);
    const RankOrder order = make_rank_order(job.view(rank));
    const std::vector<int64_t> leaders = job.leaders(rank);
    NetworkPlaces places;
    find_places(routing, job.nodes, counts, places);
    REQUIRE(places.begins[job.nodes.num_nodes] == leaders.size());
    REQUIRE(packed_packets(job.nodes, counts, rank) == static_cast<int64_t>(leaders.size()));
    // Each token once in the list of each other node that has one of its experts.
    std::set<std::pair<int, int64_t>> listed, wanted;
    for (int node = 0; node < job.nodes.num_nodes; ++node) {
      for (uint32_t i = places.begins[node]; i < places.begins[node + 1]; ++i) {
        REQUIRE(job.node_of_expert(job.item(rank, leaders[i] / job.topk, leaders[i] % job.topk).expert) ==
                node);
        REQUIRE(listed.insert({node, leaders[i] / job.topk}).second);
      }
    }
    for (int64_t token = 0; token < job.tokens(rank); ++token) {
      for (int k = 0; k < job.topk; ++k) {
        const int expert = job.item(rank, token, k).expert;
        if (expert >= 0 && job.node_of_expert(expert) != job.nodes.node[rank])
          wanted.insert({job.node_of_expert(expert), token});
      }
    }
    REQUIRE(listed == wanted);
    // Push warps pack each once, into the chunk that they say; and they push each row for a rank of their node
    // once, with those of split experts first.
    const auto tables = tables_of(job, rank);
    moe::Turns turns;
    fill_turns(routing, job.nodes, order, *tables, chunks, places, num_split, turns);
    std::map<int, std::vector<bool>> is_pushed;  // by rank, by this rank's rows for it
    for (int local = 0; local < order.num_local; ++local) {
      const int first = routing.first_expert(order.rank_at[local]);
      const int end = routing.first_expert(order.rank_at[local] + 1);
      is_pushed[order.rank_at[local]].resize(tables->own_rows[end] - tables->own_rows[first]);
    }
    const auto push = [&](int to, uint32_t of_rank, bool is_first) {
      const PushUnit unit = unit_of(routing, 8, *tables, to, of_rank);
      REQUIRE(job.nodes.node[to] == job.nodes.node[rank]);
      REQUIRE(unit.rank == to);
      REQUIRE(!PackNote{unit.note}.is_packed());
      const int first = routing.first_expert(to);
      for (uint32_t i = 0; i < unit.num_rows; ++i) {
        const uint32_t row = unit.position + i - tables->own_rows[first];
        REQUIRE(!is_pushed[to].at(row));
        is_pushed[to][row] = true;
        const int local = moe::find_interval(tables->own_rows + first, routing.num_experts(to), row);
        REQUIRE(moe::is_split(routing, to, num_split, local) == is_first);
      }
    };
    std::set<uint32_t> packed;
    std::map<std::pair<int, int>, uint32_t> units;
    int list = 0;
    uint32_t index = 0;
    for (uint32_t turn = 0; turns.at(turn, &list, &index); ++turn) {
      if (list < job.nranks) {
        push(list, units_before_split(routing, *tables, list, num_split) + index, true);
        continue;
      }
      const PushUnit unit = pack_unit_of(routing, chunks, places, list - job.nranks, index);
      const PackNote note{unit.note};
      REQUIRE(note.is_packed());
      REQUIRE(note.node() == list - job.nranks);
      const uint32_t count = places.packed(note.node());
      ++units[{note.node(), note.chunk()}];
      for (uint32_t i = 0; i < unit.num_rows; ++i) {
        REQUIRE(packed.insert(unit.row + i).second);
        const uint32_t number = unit.row + i - places.begins[note.node()];
        REQUIRE(number >= chunks.begin(count, note.chunk()));
        REQUIRE(number < chunks.begin(count, note.chunk()) + chunks.packets(count, note.chunk()));
      }
    }
    REQUIRE(packed.size() == leaders.size());
    moe::Turns late;
    fill_late_turns(routing, order, *tables, num_split, late);
    for (uint32_t turn = 0; late.at(turn, &list, &index); ++turn) push(list, index, false);
    for (const auto& [to, rows] : is_pushed) REQUIRE(std::find(rows.begin(), rows.end(), false) == rows.end());
    for (const auto& [chunk, num_units] : units)
      REQUIRE(chunks.units_of_chunk(places.packed(chunk.first), chunk.second) == num_units);
    // Chunks go to the rail peers.
    for (int i = 0; i < order.num_rail_peers; ++i) {
      const int peer = order.rail_peers[i];
      const int node = job.nodes.node[peer];
      const uint32_t count = counts.node_tokens(rank, node);
      const int64_t target = relayed_packets(job.nodes, counts, peer, rank);
      REQUIRE(job.nodes.relays(peer, rank));
      REQUIRE(chunks.num_chunks(count) <= chunks.max_chunks);
      uint32_t sent = 0;
      for (int chunk = 0; chunk < chunks.num_chunks(count); ++chunk) {
        REQUIRE(chunks.begin(count, chunk) == sent);
        REQUIRE(chunks.packets(count, chunk) > 0);
        if (chunk + 1 < chunks.num_chunks(count))
          REQUIRE(chunks.packets(count, chunk) >= static_cast<uint32_t>(chunks.least_packets));
        for (uint32_t packet = 0; packet < chunks.packets(count, chunk); ++packet, ++sent) {
          const auto [at, is_new] =
              arrived.insert({{peer, target + sent}, {rank, leaders[places.begins[node] + sent]}});
          REQUIRE(is_new);
        }
        const int signal = numbers.signal(rank, chunk);
        REQUIRE(signals.insert({peer, signal}).second);
        REQUIRE(signal >= kEntrySignals + job.nranks);
        REQUIRE(signal < numbers.num_signals());
      }
      REQUIRE(sent == count);
    }
  }
}

void check_forwarded(const Job& job, const moe::PacketChunks& chunks, const Arrived& arrived) {
  const NetworkNumbers numbers = numbers_of(job);
  std::map<std::tuple<int, uint32_t>, std::tuple<int, int64_t, int>> landed;  // (rank, row): source, token, k
  size_t num_taken = 0;
  for (int relay = 0; relay < job.nranks; ++relay) {
    const moe::CudaRouting routing = job.routing(relay);
    const moe::Counts counts = job.counts(routing);
    const RankOrder order = make_rank_order(job.view(relay));
    const auto tables = tables_of(job, relay);
    moe::Turns turns;
    fill_forward_turns(routing, job.nodes, order, chunks, counts, turns);
    std::map<int, std::pair<std::tuple<int, uint32_t, int>, uint32_t>> left;  // by count: of which block, rows
    int relayed = 0;
    uint32_t number = 0;
    for (uint32_t turn = 0; turns.at(turn, &relayed, &number); ++turn) {
      const int source = order.relayed[relayed];
      const uint32_t count = counts.node_tokens(source, job.nodes.node[relay]);
      const int chunk = chunks.chunk_of_unit(count, number);
      const uint32_t first = number * static_cast<uint32_t>(chunks.unit_packets);
      REQUIRE(chunks.packets_of_unit(count, number) * job.topk <= 32);
      REQUIRE(first >= chunks.begin(count, chunk));
      REQUIRE(first + chunks.packets_of_unit(count, number) <=
              chunks.begin(count, chunk) + chunks.packets(count, chunk));
      for (uint32_t i = 0; i < chunks.packets_of_unit(count, number); ++i, ++num_taken) {
        const auto at = arrived.find({relay, relayed_packets(job.nodes, counts, relay, source) + first + i});
        REQUIRE(at != arrived.end());
        REQUIRE(at->second.first == source);
        const int64_t token = at->second.second / job.topk;
        for (int k = 0; k < job.topk; ++k) {
          const Item& item = job.item(source, token, k);
          const ForwardRow row =
              forward_row(routing, job.nodes, *tables, counts, source, item.expert, item.slot);
          const bool is_here = item.expert >= 0 && job.node_of_expert(item.expert) == job.nodes.node[relay];
          REQUIRE((row.rank >= 0) == is_here);
          if (!is_here) continue;
          REQUIRE(row.rank == job.rank_of_expert(item.expert));
          REQUIRE(landed.insert({{row.rank, row.row}, {source, token, k}}).second);
          const int list = relayed * order.num_local + job.nodes.local_rank[row.rank];
          const int index = numbers.forward_count(list, static_cast<int>(row.block));
          REQUIRE(list < numbers.max_forward_lists);
          REQUIRE(index >= numbers.own_count(job.nranks, 0));
          REQUIRE(index < numbers.packed_count(0, 0));
          const std::tuple<int, uint32_t, int> block = {row.rank, row.block, source};
          const auto [counted, is_first] = left.insert({index, {block, row.expected}});
          REQUIRE(counted->second.first == block);
          REQUIRE(counted->second.second > 0);
          --counted->second.second;
        }
      }
    }
    for (const auto& [index, block] : left) REQUIRE(block.second == 0);
    // Its region ends with the last of them.
    const int64_t end = relayed_packets(job.nodes, counts, relay, job.nranks);
    const auto after = arrived.lower_bound({relay + 1, 0});
    if (after == arrived.begin() || std::prev(after)->first.first != relay) {
      REQUIRE(end == 0);
    } else {
      REQUIRE(std::prev(after)->first.second + 1 == end);
    }
  }
  REQUIRE(num_taken == arrived.size());
  // Where one node's kernel would put it: by expert, source, slot.
  size_t num_rows = 0;
  for (int expert = 0; expert < job.experts; ++expert) {
    const int rank = job.rank_of_expert(expert);
    const auto tables = tables_of(job, rank);
    const moe::CudaRouting routing = job.routing(rank);
    for (int source = 0; source < job.nranks; ++source) {
      if (job.nodes.node[source] == job.nodes.node[rank]) continue;
      uint32_t first = tables->rows[expert] - tables->rows[routing.first_expert(rank)];
      for (int before = 0; before < source; ++before) first += job.counts(routing).expert_rows(before, expert);
      for (int64_t token = 0; token < job.tokens(source); ++token) {
        for (int k = 0; k < job.topk; ++k) {
          if (job.item(source, token, k).expert != expert) continue;
          const auto at = landed.find({rank, first + job.item(source, token, k).slot});
          REQUIRE(at != landed.end());
          REQUIRE(at->second == std::tuple(source, token, k));
          ++num_rows;
        }
      }
    }
  }
  REQUIRE(num_rows == landed.size());
}

}  // namespace

TEST_CASE("a token enters each node that needs it once, and its rows land where they belong") {
  std::mt19937 random(1);
  for (int turn = 0; turn < 20; ++turn) {
    for (const auto& nodes : TOPOLOGIES) {
      const int topk = 1 + static_cast<int>(random() % 8);
      const Job job(MK_OPERATOR_MOE_DISPATCH_GEMM, nodes, topk + static_cast<int>(random() % 40), topk, random);
      const int unit = 1 + static_cast<int>(random() % (32 / topk));
      for (const int units : {1, 3, 50}) {
        const moe::PacketChunks chunks = {unit, unit * units, 7};
        Arrived arrived;
        check_sent(job, chunks, static_cast<int>(random() % (job.experts + 2)), arrived);
        check_forwarded(job, chunks, arrived);
      }
    }
  }
}

TEST_CASE("tokens are packed in the order in which their node computes") {
  std::mt19937 random(2);
  for (const auto& nodes : TOPOLOGIES) {
    const Job job(MK_OPERATOR_MOE_DISPATCH_GEMM, nodes, 24, 4, random);
    for (int rank = 0; rank < job.nranks; ++rank) {
      const moe::CudaRouting routing = job.routing(rank);
      std::map<int, std::tuple<int, int, int64_t>>
          last;  // by node: number of the expert at its rank, rank, token
      for (const int64_t leader : job.leaders(rank)) {
        const int expert = job.item(rank, leader / job.topk, static_cast<int>(leader % job.topk)).expert;
        const std::tuple<int, int, int64_t> key = {expert % routing.experts_per_rank,
                                                   job.rank_of_expert(expert), leader / job.topk};
        // No item of the token in that node is computed before it.
        for (int k = 0; k < job.topk; ++k) {
          const int other = job.item(rank, leader / job.topk, k).expert;
          if (other < 0 || job.node_of_expert(other) != job.node_of_expert(expert)) continue;
          REQUIRE(std::tuple(other % routing.experts_per_rank, job.rank_of_expert(other), leader / job.topk) >=
                  key);
        }
        const auto [before, is_first] = last.insert({job.node_of_expert(expert), key});
        REQUIRE((is_first || before->second < key));
        before->second = key;
      }
    }
  }
}

TEST_CASE("near tiles wait for no other node, and with ranks node by node they are all that do not") {
  std::mt19937 random(7);
  for (int turn = 0; turn < 200; ++turn) {
    const std::vector<int32_t>& topology = TOPOLOGIES[turn % TOPOLOGIES.size()];
    const Job job(MK_OPERATOR_MOE_DISPATCH_GEMM, topology, 1 + static_cast<int>(random() % 12),
                  1 + static_cast<int>(random() % 4), random);
    const int block_m = turn % 2 == 0 ? 128 : 64;
    const bool is_sorted = std::is_sorted(topology.begin(), topology.end());
    for (int rank = 0; rank < job.nranks; ++rank) {
      const moe::CudaRouting routing = job.routing(rank);
      const moe::Counts counts = job.counts(routing);
      for (int expert = routing.first_expert(rank); expert < routing.first_expert(rank + 1); ++expert) {
        std::vector<bool> is_near;  // by row
        for (int source = 0; source < job.nranks; ++source) {
          is_near.insert(is_near.end(), counts.expert_rows(source, expert),
                         job.nodes.node[source] == job.nodes.node[rank]);
        }
        const auto num_rows = static_cast<int>(is_near.size());
        const int num_tiles = (num_rows + block_m - 1) / block_m;
        const TileRange range = moe::near_tiles(routing, job.nodes, counts, expert, block_m);
        REQUIRE(range.begin <= range.end);
        REQUIRE(range.end <= num_tiles);
        for (int tile = 0; tile < num_tiles; ++tile) {
          // A tile waits for the whole of its block.
          const int begin = tile * block_m / moe::BLOCK_ROWS * moe::BLOCK_ROWS;
          const int end = std::min(begin + moe::BLOCK_ROWS, num_rows);
          const bool waits =
              std::find(is_near.begin() + begin, is_near.begin() + end, false) != is_near.begin() + end;
          const bool is_in_range = tile >= range.begin && tile < range.end;
          if (is_in_range || is_sorted) REQUIRE(is_in_range == !waits);
        }
      }
    }
  }
}

TEST_CASE("flags, counts and signals between nodes do not overlap") {
  const NetworkNumbers numbers = {6, 3, 40, 7, 12};
  std::set<int> flags, counts, signals;
  for (int i = 0; i < 6; ++i) REQUIRE(flags.insert(i).second);  // counts of ranks
  for (int i = 0; i < 6 * 40; ++i) REQUIRE(flags.insert(6 + i).second);
  for (int i = 0; i < 6; ++i) REQUIRE(signals.insert(kEntrySignals + i).second);
  for (int chunk = 0; chunk < 7; ++chunk) {
    for (int rank = 0; rank < 6; ++rank) {
      REQUIRE(flags.insert(numbers.arrived_flag(rank, chunk)).second);
      REQUIRE(signals.insert(numbers.signal(rank, chunk)).second);
    }
    for (int node = 0; node < 3; ++node) {
      REQUIRE(flags.insert(numbers.packed_flag(node, chunk)).second);
      REQUIRE(counts.insert(numbers.packed_count(node, chunk)).second);
    }
  }
  for (int block = 0; block < 40; ++block) {
    for (int rank = 0; rank < 6; ++rank) REQUIRE(counts.insert(numbers.own_count(rank, block)).second);
    for (int list = 0; list < 12; ++list) REQUIRE(counts.insert(numbers.forward_count(list, block)).second);
  }
  REQUIRE(*flags.rbegin() + 1 == numbers.num_flags());
  REQUIRE(*counts.rbegin() + 1 == numbers.num_counts());
  REQUIRE(*signals.rbegin() + 1 == numbers.num_signals());
}

TEST_CASE("what maxima have prepared has room for every dispatch between nodes that they cover") {
  std::mt19937_64 random(3);
  const auto below = [&](int64_t limit) { return std::uniform_int_distribution<int64_t>(0, limit)(random); };
  for (int turn = 0; turn < 500; ++turn) {
    const auto& split = TOPOLOGIES[static_cast<size_t>(turn) % TOPOLOGIES.size()];
    const auto nranks = static_cast<int>(split.size());
    const TopologyArrays arrays(Topology::make(0, std::vector<std::string>(split.size(), "host"), split));
    MoeCall maxima = make_call(1 + static_cast<int>(below(511)), 1 + static_cast<int>(below(15)));
    maxima.is_maxima = true;
    maxima.hidden = 8 * (1 + below(1000));
    maxima.capacity_rows = 1 + below(100000);
    maxima.max_tokens = turn % 2 == 0 ? 0 : 1 + below(5000);
    const Result<MoePlan> prepared = moe_plan(maxima, nranks, 132, &arrays.view());
    REQUIRE(prepared.ok());
    MoeCall call = maxima;
    call.is_maxima = false;
    call.max_tokens = 0;
    call.hidden = 8 * (1 + below(maxima.hidden / 8 - 1));
    call.topk = 1 + static_cast<int>(below(maxima.topk - 1));
    call.capacity_rows = below(maxima.capacity_rows);
    call.tokens = below(5000);
    const Result<MoePlan> plan = moe_plan(call, nranks, 132, &arrays.view());
    REQUIRE(plan.ok());
    const MoeNetworkPlan& network = plan.value().network;
    REQUIRE(plan.value().area_bytes <= prepared.value().area_bytes);
    REQUIRE(network.layout.begin >= plan.value().layout.bytes());
    // The most that can travel: all rows of the largest node, from elsewhere.
    int64_t largest = 0;
    for (int node = 0; node < arrays.view().num_nodes; ++node)
      largest = std::max<int64_t>(largest, arrays.view().node_nranks(node));
    if (maxima.max_tokens == 0) {
      REQUIRE(network.layout.bytes(largest * call.capacity_rows, 0) <= prepared.value().area_bytes);
    } else {
      REQUIRE(network.layout.bytes(0, std::min(maxima.max_tokens, call.capacity_rows)) <=
              prepared.value().area_bytes);
    }
    REQUIRE(network.chunks.unit_packets * call.topk <= 32);
    REQUIRE(network.chunks.least_packets % network.chunks.unit_packets == 0);
    REQUIRE(network.chunks.least_packets * network.layout.packet_bytes >= 256 << 10);
    REQUIRE(network.layout.begin % 128 == 0);
    REQUIRE(network.layout.packet_bytes % 16 == 0);
    REQUIRE(plan.value().plan.network_bytes ==
            call.tokens * std::min(call.topk, arrays.view().num_nodes - 1) * network.layout.packet_bytes);
  }
}

TEST_CASE("a plan splits experts where that fills the time that the network takes") {
  for (const mk_operator_t op : {MK_OPERATOR_MOE_DISPATCH_GEMM, MK_OPERATOR_MOE_GEMM_COMBINE}) {
    const auto splits = [&](const std::vector<int32_t>& nodes, int64_t tokens, int64_t inter, int topk = 8) {
      const TopologyArrays arrays(Topology::make(0, std::vector<std::string>(nodes.size(), "host"), nodes));
      MoeCall call = test::make_moe_call(op, 256, topk);
      call.hidden = 7168;
      call.inter = inter;
      call.tokens = tokens;
      call.capacity_rows = 4 * tokens * call.topk;
      const Result<MoePlan> plan = moe_plan(call, static_cast<int>(nodes.size()), 132, &arrays.view());
      REQUIRE(plan.ok());
      return plan.value().network.num_split;
    };
    // Nowhere is a block of one node's rows,
    CHECK(splits({0, 1}, 8, 2048) == 0);
    CHECK(splits({0, 1}, 2048, 2048) == 0);
    // in some places, in most,
    CHECK(splits({0, 1}, 4096, 2048) > 16);
    CHECK(splits({0, 1}, 8192, 2048) > splits({0, 1}, 4096, 2048));
    CHECK(splits({0, 1}, 8192, 2048) < 100);
    // and the product hides the network.
    CHECK(splits({0, 1}, 8192, 16384) == 0);
    // A row a token: as many rows there as tokens go there, but for rounding.
    for (int32_t num_nodes = 2; num_nodes <= 32; ++num_nodes) {
      std::vector<int32_t> nodes;
      for (int32_t node = 0; node < num_nodes; ++node) nodes.push_back(node);
      CHECK(splits(nodes, 1 << 15, 64, 1) == ceil_div(256, num_nodes));
    }
    // No more than a rank has.
    CHECK(splits({0, 1}, 65536, 64) == 128);
    CHECK(splits({0, 0, 0, 0, 1, 1, 1, 1}, 65536, 64) == 32);
  }
}

TEST_CASE("a plan says what it cannot do between nodes") {
  const std::vector<int32_t> split = {0, 0, 1, 1};
  const TopologyArrays arrays(Topology::make(0, std::vector<std::string>(4, "host"), split));
  MoeCall call = make_call(8, 2);
  REQUIRE(moe_plan(call, 4, 3, &arrays.view()).ok());
  REQUIRE(moe_plan(call, 4, 2, &arrays.view()).status().code() == MK_ERROR_UNSUPPORTED);
  call.capacity_rows = 128 * 65000;
  REQUIRE(moe_plan(call, 4, 132, &arrays.view()).status().code() == MK_ERROR_UNSUPPORTED);
}
