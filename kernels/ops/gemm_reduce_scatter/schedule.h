// SPDX-License-Identifier: MIT
// GEMM+ReduceScatter: who reduces whose rows, into which slots the partial products go, which flags and signals
// say so, and in which order tiles are computed and summed. Host and device.
//
// Every rank computes a partial product for every owner's rows. Inside each node one rank reduces an owner's
// rows: the owner itself in its own node, the owner's rail peer in the others. Partials are pushed into that
// reducer's slots, one slot a local source; the reducer sums them in local-rank order and, outside the owner's
// node, puts the node's sum to the owner, which adds the node sums in node order.
#pragma once

#include "../../protocol.h"

namespace mk::gemm_reduce_scatter {

struct Schedule {
  TopologyView topology;
  int64_t m;
  int64_t n;
  int64_t chunk_rows;
  int64_t tile_m;
  int max_chunks;
  int max_local_nranks;  // of any node
  int comm_element_bytes;

  MK_HOST_DEVICE int64_t rows(int owner) const { return rows_count(m, topology.nranks, owner); }
  MK_HOST_DEVICE int64_t max_rows() const { return ceil_div(m, topology.nranks); }
  MK_HOST_DEVICE int chunks(int owner) const { return num_chunks(rows(owner), chunk_rows); }
  MK_HOST_DEVICE int64_t chunk_count(int owner, int chunk) const {
    return min_of(chunk_rows, rows(owner) - chunk * chunk_rows);
  }

  // The rank of `node` that sums the node's partials for `owner`.
  MK_HOST_DEVICE int reducer(int owner, int node) const {
    return topology.node_of_rank[owner] == node ? owner : topology.rail_peer(owner, node);
  }
  // Owners that one rank of `node` reduces for, at most, in any one node.
  MK_HOST_DEVICE int owners_per_node(int node) const {
    return static_cast<int>(ceil_div(max_local_nranks, topology.node_nranks(node)));
  }
  // Where a reducer of `node` keeps `owner`: a number below num_nodes * owners_per_node(node).
  MK_HOST_DEVICE int reduction(int owner, int node) const {
    const int turn = topology.node_of_rank[owner] == node
                         ? 0
                         : topology.local_rank_of_rank[owner] / topology.node_nranks(node);
    return topology.node_of_rank[owner] * owners_per_node(node) + turn;
  }

  // Regions of a bank: partial slots [reduction][local source][rows][n], then node sums to send
  // [reduction][rows][n], then node sums received [node][rows][n]. Rows at a 16-byte aligned pitch.
  MK_HOST_DEVICE size_t row_bytes() const { return static_cast<size_t>(n) * comm_element_bytes; }
  MK_HOST_DEVICE size_t row_pitch() const { return static_cast<size_t>(round_up(n * comm_element_bytes, 16)); }
  MK_HOST_DEVICE size_t slot_bytes() const { return static_cast<size_t>(max_rows()) * row_pitch(); }
  MK_HOST_DEVICE int reductions(int node) const { return topology.num_nodes * owners_per_node(node); }
  MK_HOST_DEVICE size_t partial_offset(int node, int reduction, int local_source, int64_t row) const {
    return (static_cast<size_t>(reduction) * topology.node_nranks(node) + local_source) * slot_bytes() +
           static_cast<size_t>(row) * row_pitch();
  }
  MK_HOST_DEVICE size_t send_offset(int node, int reduction, int64_t row) const {
    return partial_offset(node, reductions(node), 0, 0) + static_cast<size_t>(reduction) * slot_bytes() +
           static_cast<size_t>(row) * row_pitch();
  }
  // The same at every rank: the largest of the nodes' partial and send regions comes first.
  MK_HOST_DEVICE size_t sums_begin() const {
    size_t largest = 0;
    for (int node = 0; node < topology.num_nodes; ++node) {
      const size_t end = send_offset(node, topology.num_nodes > 1 ? reductions(node) : 0, 0);
      if (end > largest) largest = end;
    }
    return largest;
  }
  MK_HOST_DEVICE size_t sum_offset(int source_node, int64_t row) const {
    return sums_begin() + static_cast<size_t>(source_node) * slot_bytes() +
           static_cast<size_t>(row) * row_pitch();
  }
  MK_HOST_DEVICE size_t area_bytes() const {
    return sum_offset(topology.num_nodes > 1 ? topology.num_nodes : 0, 0);
  }

  // Flag at the reducer: local source's partial of a chunk is there.
  MK_HOST_DEVICE int flag(int reduction, int local_source, int chunk) const {
    return (reduction * max_local_nranks + local_source) * max_chunks + chunk;
  }
  MK_HOST_DEVICE int num_flags() const {
    int largest = 0;
    for (int node = 0; node < topology.num_nodes; ++node) {
      const int flags = flag(reductions(node), 0, 0);
      if (flags > largest) largest = flags;
    }
    return largest;
  }
  // Signal at the owner: the sum of `source_node` for a chunk is there.
  MK_HOST_DEVICE int signal(int source_node, int chunk) const {
    return kEntrySignals + source_node * max_chunks + chunk;
  }
  MK_HOST_DEVICE int num_signals() const { return topology.num_nodes * max_chunks; }

  // Owners in the order in which their partials are computed: other nodes first (their sums have the longest
  // way), then the others of this node, this rank last.
  MK_HOST_DEVICE int owner_at(int position) const {
    const int local = topology.local_nranks();
    const int remote = topology.nranks - local;
    if (position < remote) return topology.rotated(local + position);
    const int turn = position - remote + 1;
    return topology.rotated(turn == local ? 0 : turn);
  }
  MK_HOST_DEVICE int64_t tile_rows(int owner) const { return ceil_div(rows(owner), tile_m); }
};

}  // namespace mk::gemm_reduce_scatter
