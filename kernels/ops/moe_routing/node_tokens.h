// SPDX-License-Identifier: MIT
// Mixture of experts on GPUs of several nodes: in which order a rank's tokens are packed for another node, and
// how such a list is cut into what is put. Host and device.
//
// A token enters each other node that has one of its experts once. The list for a node is in the order in which
// that node computes: all of its ranks begin with their first expert, so a token's place is that of the item of
// the node that comes first by (number among its rank's experts, rank). Tokens led by the same expert follow
// each other as they are numbered.
#pragma once

#include "kernels/device/network_comm.h"
#include "kernels/ops/moe_routing/cuda_params.h"

namespace mk::moe {

// The topology in a kernel's parameter.
struct NodeMap {
  int num_nodes;
  uint8_t node[MAX_GPU_RANKS];          // of each rank
  uint8_t local_rank[MAX_GPU_RANKS];    // of each rank
  uint8_t num_ranks[MAX_GPU_RANKS];     // of each node
  uint8_t ranks_before[MAX_GPU_RANKS];  // in the nodes before each

  // Does `relay` speak for its node with `rank` of another?
  MK_HOST_DEVICE bool relays(int relay, int rank) const {
    return node[rank] != node[relay] && local_rank[rank] % num_ranks[node[relay]] == local_rank[relay];
  }
  // The place of an expert's tokens among those of all experts: node by node.
  MK_HOST_DEVICE int place(const CudaRouting& routing, int expert) const {
    const int rank = expert / routing.experts_per_rank;
    const int of = node[rank];
    return ranks_before[of] * routing.experts_per_rank + expert % routing.experts_per_rank * num_ranks[of] +
           local_rank[rank];
  }
  MK_HOST_DEVICE int num_places(const CudaRouting& routing) const {
    return routing.nranks * routing.experts_per_rank;
  }
};
// There may be a few more places than experts.
constexpr int MAX_PLACES = CUDA_MAX_EXPERTS + MAX_GPU_RANKS;

inline NodeMap make_node_map(const TopologyView& view) {
  NodeMap map{};
  map.num_nodes = view.num_nodes;
  for (int rank = 0; rank < view.nranks; ++rank) {
    map.node[rank] = static_cast<uint8_t>(view.node_of_rank[rank]);
    map.local_rank[rank] = static_cast<uint8_t>(view.local_rank_of_rank[rank]);
  }
  for (int node = 0; node < view.num_nodes; ++node) {
    map.num_ranks[node] = static_cast<uint8_t>(view.node_nranks(node));
    map.ranks_before[node] = static_cast<uint8_t>(view.node_begin[node]);
  }
  return map;
}

// Of two of a token's items, given their places: does the first one lead?
MK_HOST_DEVICE bool comes_before(const CudaRouting& routing, int place, int other) {
  return routing.combines ? place > other : place < other;
}

// Where an expert's tokens are listed: for which node, and the place there. Dear to work out for each item.
// The node, above 16 bits of place; negative: none, because the node is this one, or it is no expert.
struct ListPlace {
  int32_t bits;

  MK_HOST_DEVICE static ListPlace of(const CudaRouting& routing, const NodeMap& nodes, int64_t expert) {
    if (expert < 0 || expert >= routing.experts) return {-1};
    const int node = nodes.node[expert / routing.experts_per_rank];
    if (node == nodes.node[routing.rank]) return {-1};
    return {node << 16 | nodes.place(routing, static_cast<int>(expert))};
  }
  MK_HOST_DEVICE bool is_listed() const { return bits >= 0; }
  MK_HOST_DEVICE bool has_node_of(const ListPlace& other) const { return bits >> 16 == other.bits >> 16; }
};
static_assert(MAX_PLACES < 1 << 16 && MAX_GPU_RANKS < 1 << 15);

// Is it the expert of the k-th item by which its token is listed for that expert's node? place_of(k): of the
// experts of the token's items, whatever they hold.
template <class PlaceOf>
MK_HOST_DEVICE bool leads(const CudaRouting& routing, int k, PlaceOf&& place_of) {
  const ListPlace place = place_of(k);
  bool is_first = place.is_listed();
  for (int other = 0; is_first && other < routing.topk; ++other) {
    const ListPlace another = place_of(other);
    is_first = !another.has_node_of(place) || !comes_before(routing, another.bits, place.bits);
  }
  return is_first;
}

// Tokens of the first `num_sources` ranks in the lists for `relay`'s node that it takes.
MK_HOST_DEVICE int64_t relayed_packets(const NodeMap& nodes, const Counts& counts, int relay, int num_sources) {
  int64_t packets = 0;
  for (int source = 0; source < num_sources; ++source) {
    if (nodes.relays(relay, source)) packets += counts.node_tokens(source, nodes.node[relay]);
  }
  return packets;
}
// In a rank's lists for all nodes.
MK_HOST_DEVICE int64_t packed_packets(const NodeMap& nodes, const Counts& counts, int rank) {
  int64_t packets = 0;
  for (int node = 0; node < nodes.num_nodes; ++node) packets += counts.node_tokens(rank, node);
  return packets;
}

// How a list of packets is cut up: into units, which a warp takes on, and chunks of whole units, which are put
// and have a signal each. Sender and receiver know how long the list is.
struct PacketChunks {
  int unit_packets;
  int least_packets;  // of a chunk but the last, a multiple of unit_packets
  int max_chunks;

  MK_HOST_DEVICE uint32_t size(uint32_t count) const {
    const auto least = static_cast<uint32_t>(round_up(ceil_div(count, max_chunks), unit_packets));
    return least > static_cast<uint32_t>(least_packets) ? least : static_cast<uint32_t>(least_packets);
  }
  MK_HOST_DEVICE int num_chunks(uint32_t count) const { return static_cast<int>(ceil_div(count, size(count))); }
  MK_HOST_DEVICE uint32_t begin(uint32_t count, int chunk) const { return chunk * size(count); }
  MK_HOST_DEVICE uint32_t packets(uint32_t count, int chunk) const {
    const uint32_t rest = count - begin(count, chunk);
    return rest < size(count) ? rest : size(count);
  }
  MK_HOST_DEVICE uint32_t num_units(uint32_t count) const {
    return static_cast<uint32_t>(ceil_div(count, unit_packets));
  }
  MK_HOST_DEVICE uint32_t units_of_chunk(uint32_t count, int chunk) const {
    return num_units(packets(count, chunk));
  }
  MK_HOST_DEVICE int chunk_of(uint32_t count, uint32_t packet) const {
    return static_cast<int>(packet / size(count));
  }
  MK_HOST_DEVICE int chunk_of_unit(uint32_t count, uint32_t unit) const {
    return chunk_of(count, unit * static_cast<uint32_t>(unit_packets));
  }
  MK_HOST_DEVICE uint32_t packets_of_unit(uint32_t count, uint32_t unit) const {
    const uint32_t rest = count - unit * unit_packets;
    return rest < static_cast<uint32_t>(unit_packets) ? rest : static_cast<uint32_t>(unit_packets);
  }
};

}  // namespace mk::moe
