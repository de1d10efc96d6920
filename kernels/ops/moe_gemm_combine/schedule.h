// SPDX-License-Identifier: MIT
// MoE GEMM + combine: how products of expert rows travel home, where they land, which flags and signals say so,
// who sums what. Host and device.
//
// The row of a token of this node is pushed to the token's rank. The rows of another node's rank are pushed to
// that rank's rail peer here, which adds the rows of each token, weighted, in the order of their experts, and
// puts one row a token home. The weights and places it needs came from there as routes, one a token. At home a
// token's own node's rows are added in the order of their experts, then the nodes' sums in node order.
#pragma once

#include "../moe_routing/schedule.h"

namespace mk::moe_gemm_combine {

struct Schedule {
  moe::Routing routing;
  int64_t hidden;
  int travel_bytes;  // an element on its way: out_dtype

  MK_HOST_DEVICE size_t row_bytes() const { return static_cast<size_t>(hidden) * travel_bytes; }

  // The rank of `node` that takes the rows of `home`'s tokens there, and the homes that a rank does this for.
  MK_HOST_DEVICE int collector(int home, int node) const { return routing.relay(home, node); }
  MK_HOST_DEVICE bool collects(int rank, int home) const { return home == rank || routing.relays(rank, home); }

  // Regions of a bank behind the counts. Rows collected: [home][expert's rank][expert][token]; the list of a
  // (home, expert's rank) is what flags count in.
  MK_HOST_DEVICE int64_t collect_begin(int rank, int home) const {
    int64_t rows = 0;
    for (int before = 0; before < home; ++before) {
      if (collects(rank, before)) rows += routing.node_rows(before, routing.topology.node_of_rank[rank]);
    }
    return rows;
  }
  MK_HOST_DEVICE int64_t list_begin(int rank, int home, int expert_rank) const {
    int64_t rows = collect_begin(rank, home);
    const int node = routing.topology.node_of_rank[rank];
    for (int local = 0; local < routing.topology.local_rank_of_rank[expert_rank]; ++local) {
      rows += routing.rank_rows(home, routing.topology.rank_at(node, local));
    }
    return rows;
  }
  MK_HOST_DEVICE size_t row_offset(int64_t row) const {
    return routing.counts_bytes() + static_cast<size_t>(row) * row_bytes();
  }
  // Then node sums to send [home][token], node sums received [node][token], routes received [home][token],
  // routes to send [node][token]. Tokens as they follow each other among those that go to the node.
  MK_HOST_DEVICE int64_t relayed_tokens(int rank, int homes) const {  // of the homes before `homes`
    int64_t tokens = 0;
    for (int home = 0; home < homes; ++home) {
      if (routing.relays(rank, home)) tokens += routing.node_tokens(home, routing.topology.node_of_rank[rank]);
    }
    return tokens;
  }
  MK_HOST_DEVICE int64_t remote_tokens(int rank, int nodes) const {  // to the nodes before `nodes`
    int64_t tokens = 0;
    for (int node = 0; node < nodes; ++node) {
      if (node != routing.topology.node_of_rank[rank]) tokens += routing.node_tokens(rank, node);
    }
    return tokens;
  }
  MK_HOST_DEVICE size_t sum_send_offset(int rank, int home, int64_t token) const {
    return row_offset(collect_begin(rank, routing.topology.nranks) + relayed_tokens(rank, home) + token);
  }
  MK_HOST_DEVICE size_t sum_offset(int rank, int node, int64_t token) const {
    return sum_send_offset(rank, routing.topology.nranks, remote_tokens(rank, node) + token);
  }
  MK_HOST_DEVICE size_t route_offset(int rank, int home, int64_t token) const {
    return sum_offset(rank, routing.topology.num_nodes, 0) +
           static_cast<size_t>(relayed_tokens(rank, home) + token) * routing.route_bytes();
  }
  MK_HOST_DEVICE size_t route_send_offset(int rank, int node, int64_t token) const {
    return route_offset(rank, routing.topology.nranks, remote_tokens(rank, node) + token);
  }
  MK_HOST_DEVICE size_t area_bytes(int rank) const {
    return route_send_offset(rank, routing.topology.num_nodes, 0);
  }

  // Flag at the collector: a chunk of the list of (home, expert's rank) is there.
  MK_HOST_DEVICE int flag(int home, int expert_rank, int chunk) const {
    const int node = routing.topology.node_of_rank[expert_rank];
    return routing.first_flag() +
           (routing.relay_index(home, node) * routing.max_local_nranks +
            routing.topology.local_rank_of_rank[expert_rank]) *
               routing.max_chunks +
           chunk;
  }
  // Signal at the relay in `node`: a chunk of the routes of `home`'s tokens for that node.
  MK_HOST_DEVICE int route_signal(int home, int node, int chunk) const {
    return routing.first_signal() + routing.relay_index(home, node) * routing.max_chunks + chunk;
  }
  // Signal at home: a chunk of the sums of `node`.
  MK_HOST_DEVICE int sum_signal(int node, int chunk) const {
    return routing.first_signal() + (routing.relay_indices() + node) * routing.max_chunks + chunk;
  }
};

}  // namespace mk::moe_gemm_combine
