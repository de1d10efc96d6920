// SPDX-License-Identifier: MIT
// MoE GEMM + combine on GPUs of several nodes: who collects which rows, what is sent and put, where it lies,
// and which flags, counts and signals tell of it. Host and device.
//
// The rows of a rank's tokens that a node computes come together at one rank there, their collector: the rank
// itself in its own node, the one that relays for it in another. Those that the collector has computed stay
// where they are. The relay adds up the rows of each token and puts the sums home. Which rows these are and
// their weights it learns from routes, one a token, which come from home in the order in which the sums go
// back.
#pragma once

#include "kernels/ops/moe_gemm_combine/cuda_layout.h"
#include "kernels/ops/moe_gemm_combine/push_units.h"
#include "kernels/ops/moe_routing/node_tokens.h"

namespace mk::moe_gemm_combine {

// A (token, k) on its way to the relay.
struct SumRoute {
  int32_t expert;  // -1: none of that node's
  uint32_t row;    // of the home's in that node; of an expert of the relay's, of the home's for this expert
  uint32_t block;  // of these; 0
  float weight;
};
static_assert(sizeof(SumRoute) == 16);

MK_HOST_DEVICE bool collects(const moe::NodeMap& nodes, int rank, int home) {
  return rank == home || nodes.relays(rank, home);
}
// The collector of a home's rows in `node`.
MK_HOST_DEVICE int collector_of(const moe::NodeMap& nodes, int nranks, int home, int node) {
  int rank = 0;
  while (rank < nranks - 1 && (nodes.node[rank] != node || !collects(nodes, rank, home))) ++rank;
  return rank;
}

// How much a rank has to do with. It follows from the counts.
struct Regions {
  int64_t collected;    // rows
  int64_t computed;     // rows
  int64_t relayed;      // tokens whose sums it sends
  int64_t packed;       // its own tokens, once for each other node that they go to
  int64_t remote_rows;  // of its tokens in other nodes
  int num_homes;        // that it collects for
};
MK_HOST_DEVICE Regions regions_of(const moe::CudaRouting& routing, const moe::NodeMap& nodes,
                                  const moe::Counts& counts, int rank) {
  Regions regions{};
  for (int other = 0; other < routing.nranks; ++other) {
    regions.computed += counts.rank_rows(other, rank);
    if (nodes.node[other] != nodes.node[rank]) regions.remote_rows += counts.rank_rows(rank, other);
    if (!collects(nodes, rank, other)) continue;
    ++regions.num_homes;
    for (int from = 0; from < routing.nranks; ++from) {
      if (nodes.node[from] == nodes.node[rank]) regions.collected += counts.rank_rows(other, from);
    }
  }
  regions.relayed = moe::relayed_packets(nodes, counts, rank, routing.nranks);
  regions.packed = moe::packed_packets(nodes, counts, rank);
  return regions;
}

// Behind the counts: rows, and sums, which are as long: rows collected [home][expert][token], rows computed,
// sums to send [home][token], sums received [node][token]. Then routes received [home][token], routes to send
// [node][token]; the items by which tokens are listed; and by own rows in other nodes [node][expert][token],
// where their tokens are listed.
struct NetworkLayout {
  int64_t counts_bytes;
  int64_t row_bytes;
  int64_t route_bytes;

  MK_HOST_DEVICE int64_t row(int64_t index) const { return counts_bytes + index * row_bytes; }
  MK_HOST_DEVICE static int64_t first_sum_to_send(const Regions& regions) {
    return regions.collected + regions.computed;
  }
  MK_HOST_DEVICE static int64_t first_sum(const Regions& regions) {
    return first_sum_to_send(regions) + regions.relayed;
  }
  MK_HOST_DEVICE int64_t route(const Regions& regions, int64_t index) const {
    return row(first_sum(regions) + regions.packed) + index * route_bytes;
  }
  MK_HOST_DEVICE int64_t route_to_send(const Regions& regions, int64_t index) const {
    return route(regions, regions.relayed + index);
  }
  MK_HOST_DEVICE int64_t leaders(const Regions& regions) const {
    return route_to_send(regions, regions.packed);
  }
  MK_HOST_DEVICE int64_t places(const Regions& regions) const { return leaders(regions) + regions.packed * 4; }
  MK_HOST_DEVICE int64_t bytes(const Regions& regions) const {
    return places(regions) + regions.remote_rows * 4;
  }
};

// Numbers of flags, of LaunchState's counts, and of signals. The flags and counts are the last ones of the
// first half; what is in front of them is for blocks of rows.
struct NetworkNumbers {
  int nranks;
  int num_nodes;
  int max_route_chunks;  // of a list
  int max_sum_chunks;

  MK_HOST_DEVICE int num_reserved() const { return (nranks + num_nodes) * (max_route_chunks + max_sum_chunks); }
  MK_HOST_DEVICE int first() const { return static_cast<int>(HALF_FLAGS) - num_reserved(); }
  // Flags: a chunk of routes is packed, one has come; a chunk of a home's sums is made, one has come. Where
  // something is packed or made, its units are counted under the same number.
  MK_HOST_DEVICE int packed(int node, int chunk) const { return first() + node * max_route_chunks + chunk; }
  MK_HOST_DEVICE int routed(int home, int chunk) const { return packed(num_nodes + home, chunk); }
  MK_HOST_DEVICE int made(int home, int chunk) const {
    return packed(num_nodes + nranks, 0) + home * max_sum_chunks + chunk;
  }
  MK_HOST_DEVICE int summed(int node, int chunk) const { return made(nranks + node, chunk); }

  // At the relay, and at home; behind those of the counts.
  MK_HOST_DEVICE int route_signal(int home, int chunk) const {
    return kEntrySignals + nranks + home * max_route_chunks + chunk;
  }
  MK_HOST_DEVICE int sum_signal(int node, int chunk) const {
    return route_signal(nranks, 0) + node * max_sum_chunks + chunk;
  }
  MK_HOST_DEVICE int num_signals() const { return sum_signal(num_nodes, 0); }
};

// What a rank's part of a launch takes of a bank; more than any has where the flags do not suffice.
MK_HOST_DEVICE int64_t area_bytes(const moe::CudaRouting& routing, const NetworkLayout& layout,
                                  const NetworkNumbers& numbers, const Regions& regions) {
  const int64_t collected = regions.collected / moe::BLOCK_ROWS + int64_t{regions.num_homes} * routing.experts;
  const int64_t computed = regions.computed / moe::BLOCK_ROWS + 2 * moe::CUDA_MAX_EXPERTS;
  const int64_t blocks = (collected > computed ? collected : computed) + 2 * MAX_GPU_RANKS;
  return blocks < numbers.first() ? layout.bytes(regions) : INT64_MAX;
}

// In shared memory beside Tables, the same in every CTA of a rank but the network's.
struct NetworkTables {
  Regions regions;
  // By home: its rows and blocks that this node computes, and where they begin at their collector.
  uint32_t list_rows[MAX_GPU_RANKS];
  uint32_t list_blocks[MAX_GPU_RANKS];
  uint32_t row_begins[MAX_GPU_RANKS];
  uint32_t block_begins[MAX_GPU_RANKS];
  uint32_t relayed_begins[MAX_GPU_RANKS];  // tokens, of a home that this rank relays for
  // By node: rows and tokens of this rank's in the other nodes before it.
  uint32_t remote_begins[MAX_GPU_RANKS];
  uint32_t packed_begins[MAX_GPU_RANKS];
  moe::Turns packs;  // units of routes, by node
  moe::Turns sums;   // units of sums, by home
};

// All but what scans over the experts have left in the tables: list_rows, list_blocks and, by node in
// remote_begins, this rank's rows there. By one thread.
MK_HOST_DEVICE void fill_begins(const moe::CudaRouting& routing, const moe::NodeMap& nodes,
                                const RankOrder& order, const moe::PacketChunks& route_chunks,
                                const moe::PacketChunks& sum_chunks, const moe::Counts& counts, Tables& tables,
                                NetworkTables& network) {
  const int own_node = nodes.node[routing.rank];
  network.regions = regions_of(routing, nodes, counts, routing.rank);
  tables.home_rows[routing.experts] = static_cast<uint32_t>(network.regions.collected);
  for (int home = 0; home < routing.nranks; ++home) {
    tables.collector[home] = static_cast<uint8_t>(collector_of(nodes, routing.nranks, home, own_node));
    uint32_t rows = 0, blocks = 0;
    for (int before = 0; before < home; ++before) {
      if (tables.collector[before] != tables.collector[home]) continue;
      rows += network.list_rows[before];
      blocks += network.list_blocks[before];
    }
    network.row_begins[home] = rows;
    network.block_begins[home] = blocks;
  }
  uint32_t remote = 0, packed = 0;
  for (int node = 0; node < nodes.num_nodes; ++node) {
    const uint32_t rows = node == own_node ? 0 : network.remote_begins[node];
    network.remote_begins[node] = remote;
    network.packed_begins[node] = packed;
    remote += rows;
    packed += counts.node_tokens(routing.rank, node);
  }
  network.packs.clear();
  for (int i = 0; i < order.num_rail_peers; ++i) {
    const int node = nodes.node[order.rail_peers[i]];
    network.packs.add(node, route_chunks.num_units(counts.node_tokens(routing.rank, node)));
  }
  network.sums.clear();
  for (int i = 0; i < order.num_relayed; ++i) {
    const int home = order.relayed[i];
    network.relayed_begins[home] =
        static_cast<uint32_t>(moe::relayed_packets(nodes, counts, routing.rank, home));
    network.sums.add(home, sum_chunks.num_units(counts.node_tokens(home, own_node)));
  }
}

}  // namespace mk::moe_gemm_combine
