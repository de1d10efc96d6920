// SPDX-License-Identifier: MIT
// GEMM+ReduceScatter on GPUs of several nodes: who sums which partial tiles, and where they lie. Host and
// device.
//
// In each node one rank, the reducer, sums an owner's partial tiles: the owner itself, or the rank that relays
// for it. A reducer numbers its reductions: 0 its own rows, 1 + i those of order.relayed[i]. Node sums travel
// in chunks of tiles that lie side by side in a row of tiles; chunks are numbered in the order in which tiles
// are computed.
#pragma once

#include "kernels/device/network_comm.h"
#include "kernels/protocol.h"

namespace mk::gemm_reduce_scatter {

struct TileChunk {
  int m_tile;
  int first_n_tile;
  int num_tiles;
};

struct NetworkSchedule {
  int num_nodes;
  int max_local;       // ranks of a node, at most
  int max_reductions;  // of a reducer, at most
  int tile_rows;       // of an owner, at most
  int num_n_tiles;
  int group_rows;   // rows of tiles that are walked before the next column of tiles
  int chunk_tiles;  // of a chunk, at most
  int64_t tile_bytes;

  MK_HOST_DEVICE int tiles() const { return tile_rows * num_n_tiles; }
  MK_HOST_DEVICE int chunks_per_row() const { return (num_n_tiles + chunk_tiles - 1) / chunk_tiles; }
  MK_HOST_DEVICE int max_chunks() const { return tile_rows * chunks_per_row(); }
  MK_HOST_DEVICE TileChunk chunk(int number) const {
    const int per_group = group_rows * chunks_per_row();
    const int group = number / per_group;
    const int rows = static_cast<int>(min_of(group_rows, tile_rows - group * group_rows));
    const int in_group = number - group * per_group;
    const int across = in_group / rows;
    const int first = across * chunk_tiles;
    return {group * group_rows + in_group - across * rows, first,
            static_cast<int>(min_of(chunk_tiles, num_n_tiles - first))};
  }

  // Regions of a bank: partial tiles [reduction][local source], then node sums to send [reduction], then node
  // sums that have come [node]; each a slot of an owner's tiles, at the same place.
  MK_HOST_DEVICE int64_t slot_bytes() const { return tiles() * tile_bytes; }
  MK_HOST_DEVICE int64_t partial_offset(int reduction, int local_source) const {
    return (int64_t{reduction} * max_local + local_source) * slot_bytes();
  }
  MK_HOST_DEVICE int64_t send_offset(int reduction) const {
    return partial_offset(max_reductions, 0) + reduction * slot_bytes();
  }
  MK_HOST_DEVICE int64_t sum_offset(int node) const {
    return send_offset(max_reductions) + node * slot_bytes();
  }
  MK_HOST_DEVICE int num_slots() const { return max_reductions * (max_local + 1) + num_nodes; }
  MK_HOST_DEVICE int64_t tile_offset(int m_tile, int n_tile) const {
    return (int64_t{m_tile} * num_n_tiles + n_tile) * tile_bytes;
  }

  // Flags at the reducer: a partial tile is there; it has summed a chunk, for the one that sends; and at the
  // owner: a node's sum of a chunk has come.
  MK_HOST_DEVICE int partial_flag(int reduction, int local_source, int tile) const {
    return (reduction * max_local + local_source) * tiles() + tile;
  }
  MK_HOST_DEVICE int summed_flag(int reduction, int chunk) const {
    return partial_flag(max_reductions, 0, 0) + reduction * max_chunks() + chunk;
  }
  MK_HOST_DEVICE int arrived_flag(int node, int chunk) const {
    return summed_flag(max_reductions, 0) + node * max_chunks() + chunk;
  }
  MK_HOST_DEVICE int64_t num_flags() const {
    return int64_t{max_reductions} * max_local * tiles() + int64_t{max_reductions + num_nodes} * max_chunks();
  }
  MK_HOST_DEVICE int signal(int node, int chunk) const { return kEntrySignals + node * max_chunks() + chunk; }
};

// Who is who in a reduction, by rank.
struct Reducers {
  uint8_t owner_at[MAX_GPU_RANKS];   // in the order of the tiles: other nodes' first, this rank last
  uint8_t reducer[MAX_GPU_RANKS];    // in this rank's node, of an owner's tiles
  uint8_t reduction[MAX_GPU_RANKS];  // the owner's number there
  uint8_t node[MAX_GPU_RANKS];
  int local_rank;
};

// `view` of `rank`.
inline Reducers make_reducers(const TopologyView& view) {
  Reducers made{};
  made.local_rank = view.local_rank();
  const int num_local = view.local_nranks();
  const int num_far = view.nranks - num_local;
  for (int position = 0; position < view.nranks; ++position) {
    const int turn = position - num_far + 1;  // among this node's
    const int owner = position < num_far ? view.rotated(num_local + position) : view.rotated(turn % num_local);
    made.owner_at[position] = static_cast<uint8_t>(owner);
  }
  for (int owner = 0; owner < view.nranks; ++owner) {
    made.node[owner] = static_cast<uint8_t>(view.node_of_rank[owner]);
    if (view.is_local(owner)) {
      made.reducer[owner] = static_cast<uint8_t>(owner);
      continue;
    }
    TopologyView reducer = view;
    reducer.rank = view.rail_peer(owner, view.node());
    const RankOrder order = make_rank_order(reducer);
    made.reducer[owner] = static_cast<uint8_t>(reducer.rank);
    for (int i = 0; i < order.num_relayed; ++i) {
      if (order.relayed[i] == owner) made.reduction[owner] = static_cast<uint8_t>(1 + i);
    }
  }
  return made;
}

inline int max_local_nranks(const TopologyView& view) {
  int most = 0;
  for (int node = 0; node < view.num_nodes; ++node)
    most = most < view.node_nranks(node) ? view.node_nranks(node) : most;
  return most;
}

inline int max_reductions(const TopologyView& view) {
  int most = 0;
  for (int rank = 0; rank < view.nranks; ++rank) {
    TopologyView one = view;
    one.rank = rank;
    const int count = 1 + make_rank_order(one).num_relayed;
    most = most < count ? count : most;
  }
  return most;
}

}  // namespace mk::gemm_reduce_scatter
