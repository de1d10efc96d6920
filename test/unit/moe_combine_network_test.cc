// SPDX-License-Identifier: MIT
// MoE combine between nodes on GPUs, as far as it is functions of indices and counts: every row comes to its
// collector once, where the routes and the record look for it; every token of another node is listed, routed,
// summed and put home once; flags, counts and signals do not overlap; and the plan.
#include <algorithm>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <set>
#include <tuple>
#include <vector>

#include "kernels/ops/moe_gemm_combine/network_schedule.h"
#include "kernels/ops/moe_routing/near_tiles.h"
#include "test/support/catch.h"
#include "test/unit/moe_network_job.h"

namespace {

using namespace mk;
using namespace mk::moe_gemm_combine;
using test::Item;
using test::TOPOLOGIES;
using Job = test::MoeNetworkJob;

constexpr mk_operator_t OP = MK_OPERATOR_MOE_GEMM_COMBINE;
constexpr uint32_t UNIT_ROWS = 8;
constexpr int64_t ROW_BYTES = 16;

struct Chunks {
  moe::PacketChunks routes;
  moe::PacketChunks sums;
};

// What every CTA of a rank knows, by loops in place of the kernel's scans.
struct RankTables {
  Tables rows;
  NetworkTables network;
};
std::unique_ptr<RankTables> tables_of(const Job& job, int rank, const Chunks& chunks, int num_split) {
  auto made = std::make_unique<RankTables>();
  Tables& tables = made->rows;
  NetworkTables& network = made->network;
  const moe::CudaRouting routing = job.routing(rank);
  const moe::Counts counts = job.counts(routing);
  const int first = routing.first_expert(rank), num_experts = routing.num_experts(rank);
  fill_homes(
      routing, num_split, tables, [&](int home) { return job.nodes.node[home] != job.nodes.node[rank]; },
      [&](int home) { return collects(job.nodes, rank, home); });
  for (int local = 0; local < num_experts; ++local) count_expert(routing, counts, UNIT_ROWS, local, tables);
  for (uint32_t* sums : {tables.rows, tables.blocks, tables.rounds}) {
    uint32_t sum = 0;
    for (int i = 0; i < num_experts; ++i) sum += std::exchange(sums[i], sum);
    sums[num_experts] = sum;
  }
  for (int home = 0; home < job.nranks; ++home) {
    std::vector<uint32_t> rows(static_cast<size_t>(job.nodes.num_nodes)), blocks(rows);
    for (int expert = 0; expert < job.experts; ++expert) {
      const auto node = static_cast<size_t>(job.node_of_expert(expert));
      if (home == rank) tables.home_rows[expert] = rows[node], tables.home_blocks[expert] = blocks[node];
      if (expert >= first && expert < first + num_experts) {
        tables.peer_rows[(expert - first) * job.nranks + home] = rows[node];
        tables.peer_blocks[(expert - first) * job.nranks + home] = blocks[node];
      }
      rows[node] += counts.expert_rows(home, expert);
      blocks[node] += moe::num_row_blocks(counts.expert_rows(home, expert));
    }
    network.list_rows[home] = rows[job.nodes.node[rank]];
    network.list_blocks[home] = blocks[job.nodes.node[rank]];
    for (int node = 0; home == rank && node < job.nodes.num_nodes; ++node)
      network.remote_begins[node] = rows[static_cast<size_t>(node)];
  }
  fill_begins(routing, job.nodes, make_rank_order(job.view(rank)), chunks.routes, chunks.sums, counts, tables,
              network);
  for (int i = 0; i < num_experts * job.nranks; ++i) {
    const int home = i % job.nranks;
    if (collects(job.nodes, rank, home)) {
      keep_rows(routing, counts, i / job.nranks, home, tables);
    } else {
      tables.peer_rows[i] += network.row_begins[home];
      tables.peer_blocks[i] += network.block_begins[home];
    }
  }
  return made;
}

NetworkNumbers numbers_of(const Job& job) { return {job.nranks, job.nodes.num_nodes, 5, 7}; }
NetworkLayout layout_of(const Job& job) { return {128, ROW_BYTES, 16 * job.topk}; }

// A row that has come: which it is of those that `rank` computes, and the block whose flag tells of it.
struct Landed {
  int rank;
  int64_t row;
  uint32_t block;
};
using AllLanded = std::map<std::pair<int, int64_t>, Landed>;  // (collector, row) -> where from

void push_rows(const Job& job, const std::vector<std::unique_ptr<RankTables>>& tables, int num_split,
               AllLanded& landed) {
  const CudaLayout layout{128, ROW_BYTES};
  const NetworkNumbers numbers = numbers_of(job);
  std::map<std::pair<int, uint32_t>, int64_t> units_left;  // (collector, block)
  for (int rank = 0; rank < job.nranks; ++rank) {
    const moe::CudaRouting routing = job.routing(rank);
    const RankTables& own = *tables[static_cast<size_t>(rank)];
    const int num_experts = routing.num_experts(rank);
    const int64_t products = layout.product_row(own.rows.home_rows[job.experts], 0);
    REQUIRE(own.rows.home_rows[job.experts] == own.network.regions.collected);
    REQUIRE(own.rows.rows[num_experts] == own.network.regions.computed);
    std::map<uint32_t, std::pair<int, uint32_t>> counted;  // place of a count -> (collector, block)
    std::tuple<int, int> last = {0, 0};                    // pass over the experts, expert
    for (uint32_t turn = 0; num_experts > 0 && turn < num_turns(routing, own.rows); ++turn) {
      const PushUnit unit = unit_of(routing, layout, UNIT_ROWS, own.rows, job.counts(routing), turn);
      if (unit.num_bytes == 0) continue;
      // In the order in which they are computed.
      const int64_t first = (unit.to - layout.home_row(0)) / ROW_BYTES;
      bool is_far = false;
      for (int home = 0; home < job.nranks; ++home) {
        const int64_t in_list = first - own.network.row_begins[home];
        if (own.rows.collector[home] == unit.rank && in_list >= 0 && in_list < own.network.list_rows[home])
          is_far = job.nodes.node[home] != job.nodes.node[rank];
      }
      const int expert = moe::find_interval(own.rows.rows, num_experts,
                                            static_cast<uint32_t>((unit.from - products) / ROW_BYTES));
      const bool is_split = moe::is_split(routing, rank, num_split, expert);
      const std::tuple<int, int> key = {is_split ? (is_far ? 0 : 2) : 1, expert};
      REQUIRE(key >= last);
      last = key;
      REQUIRE(job.nodes.node[unit.rank] == job.nodes.node[rank]);
      REQUIRE(unit.rank != rank);
      const uint32_t block = unit.note >> 24 & 0xffffff;
      const auto place = static_cast<uint32_t>(unit.note & 0xffffff);
      REQUIRE(static_cast<int>(unit.note >> 56) == unit.rank);
      for (int64_t i = 0; i < unit.num_bytes / ROW_BYTES; ++i) {
        const int64_t to = (unit.to - layout.home_row(0)) / ROW_BYTES + i;
        REQUIRE(landed.insert({{unit.rank, to}, {rank, (unit.from - products) / ROW_BYTES + i, block}}).second);
      }
      const auto [left, is_first] =
          units_left.insert({{unit.rank, block}, static_cast<int64_t>(unit.note >> 48 & 0xff)});
      REQUIRE(left->second > 0);
      --left->second;
      const auto [at, is_new] = counted.insert({place, {unit.rank, block}});
      REQUIRE(at->second == std::pair(unit.rank, block));
      REQUIRE(static_cast<int>(place) < numbers.first());
      REQUIRE(static_cast<int>(job.nranks + block) < numbers.first());
    }
  }
  for (const auto& [block, units] : units_left) REQUIRE(units == 0);
  for (const auto& [at, where] : landed)
    REQUIRE(at.second < tables[static_cast<size_t>(at.first)]->network.regions.collected);
}

// The row of an item at its expert's rank.
int64_t row_of(const Job& job, const RankTables& at_rank, int source, const Item& item) {
  const moe::CudaRouting routing = job.routing(job.rank_of_expert(item.expert));
  int64_t row = at_rank.rows.rows[item.expert - routing.first_expert(routing.rank)] + item.slot;
  for (int before = 0; before < source; ++before) row += job.counts(routing).expert_rows(before, item.expert);
  return row;
}

// Where the collector of a source's rows looks for one of them, number `row` and in block `block` of the list
// that comes there.
void check_found(const Job& job, const std::vector<std::unique_ptr<RankTables>>& tables,
                 const AllLanded& landed, int collector, int64_t row, int64_t block, int source,
                 const Item& item) {
  const int rank = job.rank_of_expert(item.expert);
  const RankTables& at_rank = *tables[static_cast<size_t>(rank)];
  if (rank == collector) {
    const moe::CudaRouting routing = job.routing(rank);
    const AwaitedRow its =
        kept_row(routing, at_rank.rows, item.expert, source, static_cast<uint32_t>(item.slot));
    const int64_t computed = its.row - at_rank.network.regions.collected;
    REQUIRE(computed == row_of(job, at_rank, source, item));
    const int local = item.expert - routing.first_expert(rank);
    REQUIRE(its.block == at_rank.rows.blocks[local] + (computed - at_rank.rows.rows[local]) / moe::BLOCK_ROWS);
    REQUIRE(its.flag == static_cast<int>(HALF_FLAGS + its.block));
    REQUIRE(landed.count({collector, row}) == 0);
    return;
  }
  const auto found = landed.find({collector, row});
  REQUIRE(found != landed.end());
  REQUIRE(found->second.rank == rank);
  REQUIRE(found->second.row == row_of(job, at_rank, source, item));
  REQUIRE(found->second.block == block);
}

// Units of a list, as they are dealt out, hold each token once, in the chunk that they say.
template <class CountOf>
void check_units(const moe::Turns& turns, const moe::PacketChunks& chunks, CountOf&& count_of) {
  std::map<int, uint32_t> seen;
  std::map<std::pair<int, int>, uint32_t> units;
  int list = 0;
  uint32_t unit = 0;
  for (uint32_t turn = 0; turns.at(turn, &list, &unit); ++turn) {
    const uint32_t count = count_of(list);
    const uint32_t first = unit * static_cast<uint32_t>(chunks.unit_packets);
    REQUIRE(seen[list] == first);
    const int chunk = chunks.chunk_of_unit(count, unit);
    seen[list] += chunks.packets_of_unit(count, unit);
    ++units[{list, chunk}];
    for (uint32_t token = first; token < seen[list]; ++token) REQUIRE(chunks.chunk_of(count, token) == chunk);
  }
  for (const auto& [which, tokens] : seen) REQUIRE(tokens == count_of(which));
  for (const auto& [chunk, num] : units)
    REQUIRE(num == chunks.units_of_chunk(count_of(chunk.first), chunk.second));
}

void check_rank(const Job& job, const Chunks& chunks, const std::vector<std::unique_ptr<RankTables>>& tables,
                const AllLanded& landed, int rank, std::set<std::pair<int, int64_t>>& routed,
                std::set<std::pair<int, int64_t>>& summed) {
  const moe::CudaRouting routing = job.routing(rank);
  const moe::Counts counts = job.counts(routing);
  const RankTables& own = *tables[static_cast<size_t>(rank)];
  const NetworkLayout layout = layout_of(job);
  const int own_node = job.nodes.node[rank];
  const std::vector<int64_t> leaders = job.leaders(rank);
  REQUIRE(own.network.regions.packed == static_cast<int64_t>(leaders.size()));
  check_units(own.network.packs, chunks.routes, [&](int node) { return counts.node_tokens(rank, node); });
  check_units(own.network.sums, chunks.sums, [&](int home) { return counts.node_tokens(home, own_node); });
  std::set<uint32_t> notes;
  for (size_t place = 0; place < leaders.size(); ++place) {
    const int64_t token = leaders[place] / job.topk;
    const Item& leader = job.item(rank, token, static_cast<int>(leaders[place] % job.topk));
    const int node = job.node_of_expert(leader.expert);
    const uint32_t number = static_cast<uint32_t>(place) - own.network.packed_begins[node];
    REQUIRE(number < counts.node_tokens(rank, node));
    // Where its place is noted.
    const uint32_t note = own.network.remote_begins[node] + own.rows.home_rows[leader.expert] + leader.slot;
    REQUIRE(notes.insert(note).second);
    REQUIRE(note < own.network.regions.remote_rows);
    const int relay = collector_of(job.nodes, job.nranks, rank, node);
    REQUIRE(relay == job.view(rank).rail_peer(rank, node));
    const NetworkTables& there = tables[static_cast<size_t>(relay)]->network;
    for (int k = 0; k < job.topk; ++k) {
      const Item& item = job.item(rank, token, k);
      if (item.expert < 0 || job.node_of_expert(item.expert) != node) continue;
      // The last that its node computes leads.
      REQUIRE(job.nodes.place(routing, item.expert) <= job.nodes.place(routing, leader.expert));
      const uint32_t row = own.rows.home_rows[item.expert] + item.slot;
      const uint32_t block = own.rows.home_blocks[item.expert] + item.slot / moe::BLOCK_ROWS;
      REQUIRE(row < there.list_rows[rank]);
      REQUIRE(block < there.list_blocks[rank]);
      check_found(job, tables, landed, relay, there.row_begins[rank] + row, there.block_begins[rank] + block,
                  rank, item);
    }
    const int64_t route = there.relayed_begins[rank] + number;
    REQUIRE(routed.insert({relay, route}).second);
    REQUIRE(route < there.regions.relayed);
    REQUIRE(there.relayed_begins[rank] == moe::relayed_packets(job.nodes, counts, relay, rank));
    // The sum behind all rows here, and in front of the routes.
    REQUIRE(summed.insert({rank, NetworkLayout::first_sum(own.network.regions) + static_cast<int64_t>(place)})
                .second);
    REQUIRE(layout.row(NetworkLayout::first_sum(own.network.regions) + static_cast<int64_t>(place) + 1) <=
            layout.route(own.network.regions, 0));
  }
  // Rows from this node.
  for (int64_t i = 0; i < job.tokens(rank) * job.topk; ++i) {
    const Item& item = job.item(rank, i / job.topk, static_cast<int>(i % job.topk));
    if (item.expert < 0 || job.node_of_expert(item.expert) != own_node) continue;
    check_found(
        job, tables, landed, rank, own.network.row_begins[rank] + own.rows.home_rows[item.expert] + item.slot,
        own.network.block_begins[rank] + own.rows.home_blocks[item.expert] + item.slot / moe::BLOCK_ROWS, rank,
        item);
  }
}

}  // namespace

TEST_CASE("every row comes to its collector once, and every token is listed, routed and summed once") {
  std::mt19937 random(1);
  for (int turn = 0; turn < 20; ++turn) {
    for (const auto& nodes : TOPOLOGIES) {
      const int topk = 1 + static_cast<int>(random() % 16);
      const Job job(OP, nodes, topk + static_cast<int>(random() % 40), topk, random);
      for (const int units : {1, 3, 50}) {
        const int num_split = static_cast<int>(random() % (job.experts + 2));
        const Chunks chunks = {{32, 32 * units, 5}, {1 + turn % 8, (1 + turn % 8) * units, 7}};
        std::vector<std::unique_ptr<RankTables>> tables;
        for (int rank = 0; rank < job.nranks; ++rank) tables.push_back(tables_of(job, rank, chunks, num_split));
        AllLanded landed;
        push_rows(job, tables, num_split, landed);
        std::set<std::pair<int, int64_t>> routed, summed;
        for (int rank = 0; rank < job.nranks; ++rank)
          check_rank(job, chunks, tables, landed, rank, routed, summed);
        int64_t relayed = 0;
        for (const auto& of_rank : tables) relayed += of_rank->network.regions.relayed;
        REQUIRE(relayed == static_cast<int64_t>(routed.size()));
      }
    }
  }
}

TEST_CASE("flags, counts and signals of a combine between nodes do not overlap") {
  const NetworkNumbers numbers = {6, 3, 5, 7};
  std::set<int> flags, signals;
  for (int i = 0; i < 6; ++i) REQUIRE(signals.insert(kEntrySignals + i).second);
  for (int rank = 0; rank < 6; ++rank) {
    for (int chunk = 0; chunk < 5; ++chunk) {
      REQUIRE(flags.insert(numbers.routed(rank, chunk)).second);
      REQUIRE(signals.insert(numbers.route_signal(rank, chunk)).second);
    }
    for (int chunk = 0; chunk < 7; ++chunk) REQUIRE(flags.insert(numbers.made(rank, chunk)).second);
  }
  for (int node = 0; node < 3; ++node) {
    for (int chunk = 0; chunk < 5; ++chunk) REQUIRE(flags.insert(numbers.packed(node, chunk)).second);
    for (int chunk = 0; chunk < 7; ++chunk) {
      REQUIRE(flags.insert(numbers.summed(node, chunk)).second);
      REQUIRE(signals.insert(numbers.sum_signal(node, chunk)).second);
    }
  }
  REQUIRE(*flags.begin() == numbers.first());
  REQUIRE(*flags.rbegin() + 1 == HALF_FLAGS);
  REQUIRE(static_cast<int>(flags.size()) == numbers.num_reserved());
  REQUIRE(*signals.rbegin() + 1 == numbers.num_signals());
  REQUIRE(static_cast<int>(signals.size()) == numbers.num_signals() - kEntrySignals);
}

TEST_CASE("regions of a bank follow each other") {
  const NetworkLayout layout = {1280, 48, 64};
  const Regions regions = {7, 5, 3, 2, 11, 1};
  REQUIRE(NetworkLayout::first_sum_to_send(regions) == 12);
  REQUIRE(NetworkLayout::first_sum(regions) == 15);
  REQUIRE(layout.route(regions, 0) == 1280 + 17 * 48);
  REQUIRE(layout.route_to_send(regions, 0) == layout.route(regions, 3));
  REQUIRE(layout.leaders(regions) == layout.route_to_send(regions, 2));
  REQUIRE(layout.places(regions) == layout.leaders(regions) + 2 * 4);
  REQUIRE(layout.bytes(regions) == layout.places(regions) + 11 * 4);
}

TEST_CASE("what maxima have prepared has room for every combine between nodes that they cover") {
  std::mt19937 random(3);
  for (int turn = 0; turn < 300; ++turn) {
    const auto& split = TOPOLOGIES[static_cast<size_t>(turn) % TOPOLOGIES.size()];
    const int topk = 1 + static_cast<int>(random() % 16);
    const Job job(OP, split, topk + static_cast<int>(random() % 40), topk, random);
    MoeCall maxima = test::make_moe_call(turn % 3 == 0 ? MK_OPERATOR_MOE_DISPATCH_GEMM : OP,
                                         job.experts + static_cast<int>(random() % 9), topk);
    maxima.is_maxima = true;
    maxima.hidden = 8 * (1 + random() % 100);
    maxima.out_dtype = MK_DTYPE_FP32;
    maxima.capacity_rows = 1;
    int64_t most_tokens = 1;
    for (int rank = 0; rank < job.nranks; ++rank) {
      const moe::CudaRouting routing = job.routing(rank);
      maxima.capacity_rows =
          std::max(maxima.capacity_rows, regions_of(routing, job.nodes, job.counts(routing), rank).computed);
      most_tokens = std::max(most_tokens, job.tokens(rank));
    }
    if (turn % 2 == 0) maxima.max_tokens = most_tokens;
    if (turn % 4 == 0) maxima.capacity_rows = 0;
    const Result<MoePlan> prepared = moe_plan(maxima, job.nranks, 132, &job.view(0));
    REQUIRE(prepared.ok());
    MoeCall call = test::make_moe_call(OP, job.experts, topk);
    call.capacity_rows = 0;
    call.hidden = 8 * (1 + random() % static_cast<unsigned>(maxima.hidden / 8));
    call.out_dtype = turn % 5 == 0 ? MK_DTYPE_FP32 : MK_DTYPE_BF16;
    call.tokens = most_tokens;
    const Result<MoePlan> plan = moe_plan(call, job.nranks, 132, &job.view(0));
    REQUIRE(plan.ok());
    const MoeNetworkPlan& network = plan.value().network;
    REQUIRE(plan.value().area_bytes <= prepared.value().area_bytes);
    for (int rank = 0; rank < job.nranks; ++rank) {
      const moe::CudaRouting routing = job.routing(rank);
      const Regions regions = regions_of(routing, job.nodes, job.counts(routing), rank);
      REQUIRE(area_bytes(routing, network.sum_layout, network.sum_numbers, regions) <=
              prepared.value().area_bytes);
    }
    REQUIRE(network.sum_layout.counts_bytes % 128 == 0);
    REQUIRE(network.sum_layout.counts_bytes == plan.value().layout.counts_bytes);
    REQUIRE(network.route_chunks.unit_packets <= 32);
    REQUIRE(network.route_chunks.least_packets % network.route_chunks.unit_packets == 0);
    REQUIRE(network.sum_chunks.least_packets % network.sum_chunks.unit_packets == 0);
    REQUIRE(network.sum_chunks.least_packets * network.sum_layout.row_bytes >= 512 << 10);
    REQUIRE(network.sum_chunks.max_chunks == network.sum_numbers.max_sum_chunks);
    REQUIRE(network.route_chunks.max_chunks == network.sum_numbers.max_route_chunks);
  }
}

TEST_CASE("a rank with more blocks than flags fits in no bank") {
  std::mt19937 random(4);
  const Job job(OP, {0, 1}, 8, 2, random);
  const NetworkNumbers numbers = {2, 2, 64, 512};
  const moe::CudaRouting routing = job.routing(0);
  Regions regions = {1000, 1000, 10, 10, 1000, 2};
  REQUIRE(area_bytes(routing, layout_of(job), numbers, regions) == layout_of(job).bytes(regions));
  regions.collected = int64_t{128} * numbers.first();
  REQUIRE(area_bytes(routing, layout_of(job), numbers, regions) == INT64_MAX);
  regions.collected = 1000;
  regions.computed = int64_t{128} * numbers.first();
  REQUIRE(area_bytes(routing, layout_of(job), numbers, regions) == INT64_MAX);
}

TEST_CASE("a combine's plan between nodes") {
  std::mt19937 random(5);
  const Job job(OP, {0, 0, 1, 1}, 8, 2, random);
  MoeCall call = test::make_moe_call(OP, 8, 2);
  call.tokens = 100;
  REQUIRE(moe_plan(call, 4, 3, &job.view(0)).status().code() == MK_ERROR_UNSUPPORTED);
  const Result<MoePlan> smallest = moe_plan(call, 4, 4, &job.view(0));
  REQUIRE(smallest.ok());
  REQUIRE(smallest.value().plan.compute_ctas == 1);
  REQUIRE(smallest.value().plan.copy_ctas == 1);
  REQUIRE(smallest.value().plan.reduce_ctas == 1);
  call.tuning.reduce_ctas = 9;
  const Result<MoePlan> plan = moe_plan(call, 4, 132, &job.view(0));
  REQUIRE(plan.ok());
  const mk_plan_t& seen = plan.value().plan;
  REQUIRE(seen.reduce_ctas == 9);
  REQUIRE(seen.send_ctas == 1);
  REQUIRE(seen.compute_ctas + seen.copy_ctas + seen.reduce_ctas + seen.send_ctas == 132);
  REQUIRE(seen.network_bytes == 100 * (call.hidden * element_bytes(call.out_dtype) + 16 * call.topk));
}
