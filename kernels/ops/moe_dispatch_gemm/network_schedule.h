// SPDX-License-Identifier: MIT
// MoE dispatch + GEMM on GPUs of several nodes: what is packed, put and forwarded, where it lies, and which
// flags, counts and signals tell of it. Host and device.
//
// A token travels between nodes as a packet: its elements, then its route (moe::RouteHead,
// moe::RouteItem[topk]). The rank that relays for the token's rank takes the packets in and brings each row to
// its place among those of its expert, where the token's rank would put it in one node, and raises the same
// flags.
#pragma once

#include "kernels/ops/moe_dispatch_gemm/cuda_layout.h"
#include "kernels/ops/moe_dispatch_gemm/push_units.h"
#include "kernels/ops/moe_routing/near_tiles.h"
#include "kernels/ops/moe_routing/node_tokens.h"

namespace mk::moe_dispatch_gemm {

// Behind CudaLayout's regions: packets that this rank relays [source][token], packets that it has packed
// [node][token], the items by which these were packed. How many there are follows from the counts.
struct NetworkLayout {
  int64_t begin;
  int64_t row_bytes;
  int64_t packet_bytes;

  MK_HOST_DEVICE int64_t packet(int64_t index) const { return begin + index * packet_bytes; }
  MK_HOST_DEVICE int64_t bytes(int64_t relayed, int64_t packed) const {
    return packet(relayed + packed) + packed * 4;
  }
};
inline NetworkLayout make_network_layout(const CudaLayout& layout, int topk) {
  const auto route_bytes = static_cast<int64_t>(sizeof(moe::RouteHead) + topk * sizeof(moe::RouteItem));
  return {round_up(layout.bytes(), 128), layout.row_bytes, layout.row_bytes + route_bytes};
}

using moe::packed_packets;
using moe::relayed_packets;

// Where a rank's regions are.
struct NetworkPlaces {
  int64_t relayed;                     // packets
  uint32_t begins[MAX_GPU_RANKS + 1];  // of those packed for each node

  MK_HOST_DEVICE uint32_t packed(int node) const { return begins[node + 1] - begins[node]; }
  MK_HOST_DEVICE int64_t packet(const NetworkLayout& layout, uint32_t index) const {
    return layout.packet(relayed + index);
  }
  MK_HOST_DEVICE int64_t leaders(const NetworkLayout& layout, int num_nodes) const {
    return layout.packet(relayed + begins[num_nodes]);
  }
};
MK_HOST_DEVICE void find_places(const moe::CudaRouting& routing, const moe::NodeMap& nodes,
                                const moe::Counts& counts, NetworkPlaces& places) {
  places.relayed = relayed_packets(nodes, counts, routing.rank, routing.nranks);
  places.begins[0] = 0;
  for (int node = 0; node < nodes.num_nodes; ++node)
    places.begins[node + 1] = places.begins[node] + counts.node_tokens(routing.rank, node);
}

// Numbers of flags, of LaunchState's counts, and of signals.
struct NetworkNumbers {
  int nranks;
  int num_nodes;
  int blocks_per_source;
  int max_chunks;         // of a list
  int max_forward_lists;  // of any rank: ranks relayed times ranks of its node

  // At the relay: a chunk of a source's has come. At the sender: one for a node is packed. Behind those of the
  // counts and of blocks of rows.
  MK_HOST_DEVICE int arrived_flag(int source, int chunk) const {
    return nranks * (1 + blocks_per_source) + source * max_chunks + chunk;
  }
  MK_HOST_DEVICE int packed_flag(int node, int chunk) const { return arrived_flag(nranks + node, chunk); }
  MK_HOST_DEVICE int64_t num_flags() const {
    return int64_t{nranks} * (1 + blocks_per_source) + (int64_t{nranks} + num_nodes) * max_chunks;
  }

  // A block's own units are counted by its rank; behind those, rows of a block that were forwarded, by relayed
  // rank and local step; and units packed of a chunk.
  MK_HOST_DEVICE int own_count(int rank, int block) const { return rank * blocks_per_source + block; }
  MK_HOST_DEVICE int forward_count(int list, int block) const { return own_count(nranks + list, block); }
  MK_HOST_DEVICE int packed_count(int node, int chunk) const {
    return own_count(nranks + max_forward_lists, 0) + node * max_chunks + chunk;
  }
  MK_HOST_DEVICE int64_t num_counts() const {
    return (int64_t{nranks} + max_forward_lists) * blocks_per_source + int64_t{num_nodes} * max_chunks;
  }

  // At the relay, behind those of the counts.
  MK_HOST_DEVICE int signal(int source, int chunk) const {
    return kEntrySignals + nranks + source * max_chunks + chunk;
  }
  MK_HOST_DEVICE int64_t num_signals() const {
    return int64_t{kEntrySignals} + nranks + int64_t{nranks} * max_chunks;
  }
};

inline int max_forward_lists(const TopologyView& view) {
  int most = 0;
  for (int rank = 0; rank < view.nranks; ++rank) {
    TopologyView one = view;
    one.rank = rank;
    const RankOrder order = make_rank_order(one);
    const int lists = order.num_relayed * order.num_local;
    most = most < lists ? lists : most;
  }
  return most;
}

// Units for a rank that are of experts before its split ones, whose rows are computed after those of split
// experts.
MK_HOST_DEVICE uint32_t units_before_split(const moe::CudaRouting& routing, const Tables& tables, int rank,
                                           int num_split) {
  const int first = routing.first_expert(rank);
  return tables.units[first + moe::first_split(routing, rank, num_split)] - tables.units[first];
}

// Lists that push warps deal with: rows for a rank of this node, by the rank; packets for another node, behind
// those. First rows of split experts and all packets.
MK_HOST_DEVICE int pack_list(const moe::CudaRouting& routing, int node) { return routing.nranks + node; }
MK_HOST_DEVICE void fill_turns(const moe::CudaRouting& routing, const moe::NodeMap& nodes,
                               const RankOrder& order, const Tables& tables, const moe::PacketChunks& chunks,
                               const NetworkPlaces& places, int num_split, moe::Turns& turns) {
  turns.clear();
  for (int step = 0; step < order.num_local; ++step) {
    const int rank = order.rank_at[step];
    const uint32_t units =
        tables.units[routing.first_expert(rank + 1)] - tables.units[routing.first_expert(rank)];
    turns.add(rank, units - units_before_split(routing, tables, rank, num_split));
  }
  for (int i = 0; i < order.num_rail_peers; ++i) {
    const int node = nodes.node[order.rail_peers[i]];
    turns.add(pack_list(routing, node), chunks.num_units(places.packed(node)));
  }
}
// Then the other rows for this node,
MK_HOST_DEVICE void fill_late_turns(const moe::CudaRouting& routing, const RankOrder& order,
                                    const Tables& tables, int num_split, moe::Turns& turns) {
  turns.clear();
  for (int step = 0; step < order.num_local; ++step) {
    const int rank = order.rank_at[step];
    turns.add(rank, units_before_split(routing, tables, rank, num_split));
  }
}

// and, by other warps at the same time, those that have come for it: units of each rank relayed in turn.
MK_HOST_DEVICE void fill_forward_turns(const moe::CudaRouting& routing, const moe::NodeMap& nodes,
                                       const RankOrder& order, const moe::PacketChunks& chunks,
                                       const moe::Counts& counts, moe::Turns& turns) {
  turns.clear();
  for (int i = 0; i < order.num_relayed; ++i) {
    turns.add(i, chunks.num_units(counts.node_tokens(order.relayed[i], nodes.node[routing.rank])));
  }
}

// A unit of packets that is packed: node and chunk. No other note has the last bit.
struct PackNote {
  static constexpr uint64_t BIT = uint64_t{1} << 63;
  uint64_t bits;
  MK_HOST_DEVICE static uint64_t make(int node, int chunk) {
    return BIT | static_cast<uint64_t>(node) << 32 | static_cast<uint32_t>(chunk);
  }
  MK_HOST_DEVICE bool is_packed() const { return (bits & BIT) != 0; }
  MK_HOST_DEVICE int node() const { return static_cast<int>(bits >> 32 & 0xff); }
  MK_HOST_DEVICE int chunk() const { return static_cast<int>(bits & 0xffffffff); }
};

// Of the packets for a node. `row` and `position` are a packet's number among all that are packed.
MK_HOST_DEVICE PushUnit pack_unit_of(const moe::CudaRouting& routing, const moe::PacketChunks& chunks,
                                     const NetworkPlaces& places, int node, uint32_t index) {
  const uint32_t count = places.packed(node);
  const uint32_t first = places.begins[node] + index * static_cast<uint32_t>(chunks.unit_packets);
  return {pack_list(routing, node), first, first, chunks.packets_of_unit(count, index),
          PackNote::make(node, chunks.chunk_of_unit(count, index))};
}

// Where the relay brings a row.
struct ForwardRow {
  int rank;  // -1: nowhere
  uint32_t row;
  uint32_t block;     // there
  uint32_t expected;  // rows of the source in that block
};
MK_HOST_DEVICE ForwardRow forward_row(const moe::CudaRouting& routing, const moe::NodeMap& nodes,
                                      const Tables& tables, const moe::Counts& counts, int source, int expert,
                                      uint32_t slot) {
  constexpr ForwardRow NOWHERE = {-1, 0, 0, 0};
  if (expert < 0 || expert >= routing.experts) return NOWHERE;
  const int rank = expert / routing.experts_per_rank;
  if (nodes.node[rank] != nodes.node[routing.rank]) return NOWHERE;
  uint32_t lower = 0;
  for (int other = 0; other < source; ++other) lower += counts.expert_rows(other, expert);
  const RowSegment segment{lower, counts.expert_rows(source, expert)};
  if (slot >= segment.count) return NOWHERE;
  const int first = routing.first_expert(rank);
  const uint32_t block = (lower + slot) / moe::BLOCK_ROWS;
  return {rank, tables.rows[expert] - tables.rows[first] + lower + slot,
          tables.blocks[expert] - tables.blocks[first] + block, segment.in_block(block).count};
}

}  // namespace mk::moe_dispatch_gemm
