// SPDX-License-Identifier: MIT
// Tokens of all ranks of several nodes for the tests of what the mixture-of-experts operators do between nodes
// on GPUs, and what follows from them for everyone.
#pragma once

#include <map>
#include <memory>
#include <random>
#include <set>
#include <vector>

#include "kernels/cuda/moe_plan.h"
#include "kernels/topology_arrays.h"
#include "test/support/catch.h"

namespace mk::test {

inline const std::vector<std::vector<int32_t>> TOPOLOGIES = {
    {0, 1}, {0, 0, 1, 1}, {0, 1, 0, 1}, {0, 1, 2, 3}, {0, 0, 0, 1}, {0, 0, 1, 1, 2, 2}, {0, 0, 0, 1, 1, 1}};

inline MoeCall make_moe_call(mk_operator_t op, int experts, int topk) {
  MoeCall call;
  call.op = op;
  call.hidden = 64;
  call.inter = 64;
  call.experts = experts;
  call.topk = topk;
  call.capacity_rows = 1 << 12;
  return call;
}

struct Item {
  int expert = -1;
  uint32_t slot = 0;  // among the rank's rows for the expert
};

// The tokens of all ranks, and what follows from them for everyone.
struct MoeNetworkJob {
  mk_operator_t op;
  std::vector<std::unique_ptr<TopologyArrays>> arrays;  // by rank
  moe::NodeMap nodes;
  int nranks;
  int experts;
  int topk;
  std::vector<std::vector<Item>> items;  // [rank][token * topk + k]
  std::vector<uint64_t> blocks;          // of counts

  MoeNetworkJob(mk_operator_t op_in, const std::vector<int32_t>& node_of_rank, int experts_in, int topk_in,
                std::mt19937& random)
      : op(op_in), nranks(static_cast<int>(node_of_rank.size())), experts(experts_in), topk(topk_in) {
    for (int rank = 0; rank < nranks; ++rank) {
      arrays.push_back(std::make_unique<TopologyArrays>(
          Topology::make(rank, std::vector<std::string>(node_of_rank.size(), "host"), node_of_rank)));
    }
    nodes = moe::make_node_map(view(0));
    items.resize(static_cast<size_t>(nranks));
    blocks.resize(static_cast<size_t>(routing(0).block_bytes) * nranks / 8 + 1);
    const unsigned kind = random() % 4;
    for (int rank = 0; rank < nranks; ++rank) fill(rank, kind, random);
  }

  void fill(int rank, unsigned kind, std::mt19937& random) {
    const moe::CudaRouting of = routing(rank);
    auto* numbers = reinterpret_cast<uint32_t*>(reinterpret_cast<std::byte*>(blocks.data()) +
                                                rank * of.block_bytes + sizeof(moe::CountsHead));
    const int64_t tokens = random() % 3 == 0 ? 0 : static_cast<int64_t>(random() % 300);
    std::vector<Item>& own = items[static_cast<size_t>(rank)];
    for (int64_t token = 0; token < tokens; ++token) {
      std::set<int> taken;
      for (int k = 0; k < topk; ++k) {
        int expert = static_cast<int>(random() % static_cast<unsigned>(experts));
        if (kind == 0) expert = experts - 1;
        if ((kind == 1 && random() % 2 == 0) || !taken.insert(expert).second) expert = -1;
        own.push_back({expert, expert < 0 ? 0 : numbers[expert]});
        if (expert >= 0) ++numbers[expert];
        if (expert >= 0) ++numbers[of.rank_rows_at + expert / of.experts_per_rank];
      }
      for (int k = 0; k < topk; ++k) {
        if (is_leader(rank, token, k))
          ++numbers[of.node_tokens_at + node_of_expert(own[static_cast<size_t>(token * topk + k)].expert)];
      }
    }
  }

  const TopologyView& view(int rank) const { return arrays[static_cast<size_t>(rank)]->view(); }
  moe::CudaRouting routing(int rank) const {
    static mk_moe_routing_t record;
    MoeCall call = make_moe_call(op, experts, topk);
    call.routing = &record;
    call.routing_bytes = 1 << 20;
    return cuda_routing(call, rank, nranks, view(rank).num_nodes);
  }
  moe::Counts counts(const moe::CudaRouting& of) const {
    return {of, reinterpret_cast<const std::byte*>(blocks.data())};
  }
  const Item& item(int rank, int64_t token, int k) const {
    return items[static_cast<size_t>(rank)][static_cast<size_t>(token * topk + k)];
  }
  int64_t tokens(int rank) const {
    return static_cast<int64_t>(items[static_cast<size_t>(rank)].size()) / topk;
  }
  int rank_of_expert(int expert) const { return expert / routing(0).experts_per_rank; }
  int node_of_expert(int expert) const { return nodes.node[rank_of_expert(expert)]; }
  bool is_leader(int rank, int64_t token, int k) const {
    return moe::leads(routing(rank), k, [&](int other) {
      return moe::ListPlace::of(routing(rank), nodes, item(rank, token, other).expert);
    });
  }

  // The items of a rank by which its tokens are listed for other nodes, as the counting CTAs place them.
  std::vector<int64_t> leaders(int rank) const {
    const moe::CudaRouting of = routing(rank);
    std::map<int, std::vector<int64_t>> by_place;
    for (int64_t i = 0; i < tokens(rank) * topk; ++i) {
      const int k = static_cast<int>(i % topk);
      if (is_leader(rank, i / topk, k)) by_place[nodes.place(of, item(rank, i / topk, k).expert)].push_back(i);
    }
    std::vector<int64_t> order;
    for (const auto& [place, led] : by_place) {
      CHECK(place < nodes.num_places(of));
      order.insert(order.end(), led.begin(), led.end());
    }
    return order;
  }
};

}  // namespace mk::test
