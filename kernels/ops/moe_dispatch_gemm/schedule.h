// SPDX-License-Identifier: MIT
// MoE dispatch + GEMM: how tokens travel to the ranks of their experts, where they land, which flag says so.
// Host and device.
//
// A token travels as a packet: its elements, then its route. Inside a node its rank pushes it once to each rank
// that has one of its experts. To each other node it is packed with the others for that node and put once, to
// the rail peer there, which reads the routes and pushes each packet to the ranks of its node. At its expert's
// rank the route says which row of which expert the token is.
#pragma once

#include "../moe_routing/schedule.h"

namespace mk::moe_dispatch_gemm {

struct Schedule {
  moe::Routing routing;
  int64_t hidden;

  MK_HOST_DEVICE size_t packet_bytes() const { return static_cast<size_t>(hidden) * 2 + routing.route_bytes(); }
  MK_HOST_DEVICE size_t route_offset() const { return static_cast<size_t>(hidden) * 2; }  // in a packet

  // Regions of a bank behind the counts, in packets: received [source][token], then relayed [source][token],
  // then packed for the network [node][token]. Tokens of a source are numbered as they follow each other among
  // those that go to this rank, or to this node.
  MK_HOST_DEVICE int64_t receive_begin(int rank, int source) const {
    int64_t packets = 0;
    for (int before = 0; before < source; ++before) packets += routing.rank_tokens(before, rank);
    return packets;
  }
  MK_HOST_DEVICE int64_t relay_begin(int rank, int source) const {
    int64_t packets = receive_begin(rank, routing.topology.nranks);
    for (int before = 0; before < source; ++before) {
      if (routing.relays(rank, before))
        packets += routing.node_tokens(before, routing.topology.node_of_rank[rank]);
    }
    return packets;
  }
  MK_HOST_DEVICE int64_t pack_begin(int rank, int node) const {
    int64_t packets = relay_begin(rank, routing.topology.nranks);
    for (int before = 0; before < node; ++before) {
      if (before != routing.topology.node_of_rank[rank]) packets += routing.node_tokens(rank, before);
    }
    return packets;
  }
  MK_HOST_DEVICE size_t offset(int64_t packet) const {
    return routing.counts_bytes() + static_cast<size_t>(packet) * packet_bytes();
  }
  MK_HOST_DEVICE size_t area_bytes(int rank) const {
    return offset(pack_begin(rank, routing.topology.num_nodes));
  }

  // Flag at the receiving rank: a chunk of the tokens that `source` sends to it, whatever way they came. Signal
  // at the relay: a chunk of the tokens that `source` sends to its node.
  MK_HOST_DEVICE int flag(int source, int chunk) const {
    return routing.first_flag() + source * routing.max_chunks + chunk;
  }
  MK_HOST_DEVICE int signal(int source, int node, int chunk) const {
    return routing.first_signal() + routing.relay_index(source, node) * routing.max_chunks + chunk;
  }
};

}  // namespace mk::moe_dispatch_gemm
