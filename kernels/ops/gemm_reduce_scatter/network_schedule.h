// SPDX-License-Identifier: MIT
// GEMM+ReduceScatter and GEMM+AllReduce on GPUs of several nodes: who sums which partial tiles, where they lie,
// and where finished ones do. Host and device.
//
// In each node one rank, the reducer, sums an owner's partial tiles: the owner itself, or the rank that relays
// for it. A reducer numbers its reductions: 0 its own rows, 1 + i those of order.relayed[i]. A rank that is
// alone in its node has nothing to sum: its partial tiles are its node's sums. Node sums, and finished tiles of
// an all-reduce, travel in chunks of tiles that lie side by side in a row of tiles.
#pragma once

#include "kernels/device/network_comm.h"
#include "kernels/device/tile_scheduler.h"
#include "kernels/ops/gemm_reduce_scatter/owner_tiles.h"
#include "kernels/protocol.h"

namespace mk::gemm_reduce_scatter {

struct TileChunk {
  int m_tile;
  int first_n_tile;
  int num_tiles;
};

// A tile of one of several owners, who take turns chunk by chunk.
struct ChunkTile {
  int turn;  // which owner
  int chunk;
  int m_tile;
  int n_tile;
  bool is_there;  // a row's last chunk may have fewer
};

// What a warp that sums takes on: from byte `begin` on of a tile of one of the owners that it relays for.
struct SumUnit {
  ChunkTile tile;
  int begin;
};

// What a warp that forwards takes on: bytes of a finished chunk.
struct FinishedUnit {
  int turn;  // which owner
  int chunk;
  int64_t begin;
  int num_bytes;  // 0: there are none
};

// How an owner's tiles are cut into chunks, and how these are numbered: in the order in which they are
// computed.
struct TileChunks {
  int tile_rows;  // of an owner, at most
  int num_n_tiles;
  int group_rows;   // rows of tiles that are walked before the next column of tiles
  int chunk_tiles;  // of a chunk, at most

  MK_HOST_DEVICE int tiles() const { return tile_rows * num_n_tiles; }
  MK_HOST_DEVICE int per_row() const { return (num_n_tiles + chunk_tiles - 1) / chunk_tiles; }
  MK_HOST_DEVICE int size() const { return tile_rows * per_row(); }
  MK_HOST_DEVICE int rows_of_group(int group) const {
    return static_cast<int>(min_of(group_rows, tile_rows - group * group_rows));
  }
  MK_HOST_DEVICE TileChunk at(int number) const {
    const int per_group = group_rows * per_row();
    const int group = number / per_group;
    const int rows = rows_of_group(group);
    const int in_group = number - group * per_group;
    const int across = in_group / rows;
    const int first = across * chunk_tiles;
    return {group * group_rows + in_group - across * rows, first,
            static_cast<int>(min_of(chunk_tiles, num_n_tiles - first))};
  }
  // The number of the chunk that a tile is in.
  MK_HOST_DEVICE int of_tile(int m_tile, int n_tile) const {
    const int group = m_tile / group_rows;
    const int first_row = group * group_rows;
    return first_row * per_row() + n_tile / chunk_tiles * rows_of_group(group) + m_tile - first_row;
  }

  // Tiles chunk by chunk, and of each chunk owner by owner.
  MK_HOST_DEVICE int num_tiles(int num_owners) const { return size() * num_owners * chunk_tiles; }
  MK_HOST_DEVICE ChunkTile tile(int number, int num_owners) const {
    const int turns = number / chunk_tiles;
    const int in_chunk = number - turns * chunk_tiles;
    const int number_of_chunk = turns / num_owners;
    const TileChunk place = at(number_of_chunk);
    return {turns - number_of_chunk * num_owners, number_of_chunk, place.m_tile, place.first_n_tile + in_chunk,
            in_chunk < place.num_tiles};
  }
};

struct NetworkSchedule {
  static constexpr int SUM_UNIT_BYTES = 32 << 10;
  static constexpr int FINISHED_UNIT_BYTES = 32 << 10;

  int num_nodes;
  int max_local;        // ranks of a node, at most
  int max_reductions;   // of a reducer, at most
  TileChunks sums;      // what nodes' sums travel in,
  TileChunks finished;  // and what is finished
  int64_t tile_bytes;
  int64_t finished_tile_bytes = 0;  // 0: a reduce-scatter, whose owners alone have what is finished

  MK_HOST_DEVICE int num_n_tiles() const { return sums.num_n_tiles; }
  MK_HOST_DEVICE int tiles() const { return sums.tiles(); }

  // Units of sums for `num_relayed` owners, in that order.
  MK_HOST_DEVICE int units_per_tile() const {
    return static_cast<int>((tile_bytes + SUM_UNIT_BYTES - 1) / SUM_UNIT_BYTES);
  }
  MK_HOST_DEVICE int num_sum_units(int num_relayed) const {
    return sums.num_tiles(num_relayed) * units_per_tile();
  }
  MK_HOST_DEVICE SumUnit sum_unit(int number, int num_relayed) const {
    const int tile = number / units_per_tile();
    return {sums.tile(tile, num_relayed), (number - tile * units_per_tile()) * SUM_UNIT_BYTES};
  }
  // Units of a chunk with something to sum, where `bytes` of each of its tiles have rows.
  MK_HOST_DEVICE int units_of_chunk(int number, int64_t bytes) const {
    return sums.at(number).num_tiles * static_cast<int>((bytes + SUM_UNIT_BYTES - 1) / SUM_UNIT_BYTES);
  }

  // Units of finished chunks of `num_owners`, in the same order.
  MK_HOST_DEVICE int64_t finished_chunk_bytes(int number) const {
    return finished.at(number).num_tiles * finished_tile_bytes;
  }
  MK_HOST_DEVICE int finished_units(int64_t bytes) const {
    return static_cast<int>((bytes + FINISHED_UNIT_BYTES - 1) / FINISHED_UNIT_BYTES);
  }
  MK_HOST_DEVICE int num_finished_units(int num_owners) const {
    return finished.size() * num_owners * finished_units(finished.chunk_tiles * finished_tile_bytes);
  }
  MK_HOST_DEVICE FinishedUnit finished_unit(int number, int num_owners) const {
    const int per_chunk = finished_units(finished.chunk_tiles * finished_tile_bytes);
    const int turns = number / per_chunk;
    const int number_of_chunk = turns / num_owners;
    const int64_t begin = int64_t{number - turns * per_chunk} * FINISHED_UNIT_BYTES;
    const int64_t rest = finished_chunk_bytes(number_of_chunk) - begin;
    const int64_t num_bytes = min_of(FINISHED_UNIT_BYTES, rest > 0 ? rest : 0);
    return {turns - number_of_chunk * num_owners, number_of_chunk, begin, static_cast<int>(num_bytes)};
  }

  // Regions of a bank: node sums of this rank's rows [node]; partial tiles [reduction][local source]; node sums
  // for owners elsewhere [reduction]. Each a slot of an owner's tiles, at the same place. Where every rank is
  // alone in its node there are no partial tiles of own rows, and nothing is summed for others. Behind them
  // finished tiles [owner].
  MK_HOST_DEVICE bool has_node_sums() const { return max_local > 1; }
  MK_HOST_DEVICE int64_t slot_bytes() const { return tiles() * tile_bytes; }
  MK_HOST_DEVICE int64_t sum_offset(int node) const { return node * slot_bytes(); }
  MK_HOST_DEVICE int64_t partial_offset(int reduction, int local_source) const {
    const int first = has_node_sums() ? reduction : reduction - 1;
    return (num_nodes + int64_t{first} * max_local + local_source) * slot_bytes();
  }
  MK_HOST_DEVICE int64_t send_offset(int reduction) const {
    return partial_offset(max_reductions, 0) + (reduction - 1) * slot_bytes();
  }
  MK_HOST_DEVICE int num_slots() const {
    const int others = max_reductions - 1;
    return num_nodes + (has_node_sums() ? max_reductions * max_local + others : others);
  }
  // Where a rank leaves its partial tiles of own rows, and where those for an owner elsewhere are put from.
  MK_HOST_DEVICE int64_t own_offset(bool is_alone, int node, int local_source) const {
    return is_alone ? sum_offset(node) : partial_offset(0, local_source);
  }
  MK_HOST_DEVICE int64_t put_offset(bool is_alone, int reduction) const {
    return is_alone ? partial_offset(reduction, 0) : send_offset(reduction);
  }
  MK_HOST_DEVICE int64_t tile_offset(int m_tile, int n_tile) const {
    return (int64_t{m_tile} * num_n_tiles() + n_tile) * tile_bytes;
  }

  MK_HOST_DEVICE int64_t finished_slot_bytes() const { return tiles() * finished_tile_bytes; }
  MK_HOST_DEVICE int64_t finished_offset(int owner, int m_tile, int n_tile) const {
    return num_slots() * slot_bytes() + owner * finished_slot_bytes() +
           (int64_t{m_tile} * num_n_tiles() + n_tile) * finished_tile_bytes;
  }

  // Flags at the reducer: a node's sum of a chunk is there, for the one that sends; a partial tile is there;
  // and at the owner: another node's sum of a chunk has come. What a chunk's flag waits for is counted by the
  // number of the flag.
  MK_HOST_DEVICE int summed_flag(int reduction, int chunk) const { return reduction * sums.size() + chunk; }
  MK_HOST_DEVICE int arrived_flag(int node, int chunk) const {
    return summed_flag(max_reductions, 0) + node * sums.size() + chunk;
  }
  MK_HOST_DEVICE int partial_flag(int reduction, int local_source, int tile) const {
    return arrived_flag(num_nodes, 0) + (reduction * max_local + local_source) * tiles() + tile;
  }
  MK_HOST_DEVICE int num_partial_flags() const {
    return has_node_sums() ? max_reductions * max_local * tiles() : 0;
  }
  // And at every rank: a finished chunk is here.
  MK_HOST_DEVICE int finished_flag(int owner, int chunk) const {
    return partial_flag(0, 0, num_partial_flags()) + owner * finished.size() + chunk;
  }
  MK_HOST_DEVICE int64_t num_flags(int nranks) const {
    const int64_t partials = has_node_sums() ? int64_t{max_reductions} * max_local * tiles() : 0;
    return int64_t{max_reductions} * sums.size() + partials + num_signals(nranks);
  }

  // Of a node's sum of a chunk, and of a finished one.
  MK_HOST_DEVICE int signal(int node, int chunk) const { return kEntrySignals + node * sums.size() + chunk; }
  MK_HOST_DEVICE int finished_signal(int owner, int chunk) const {
    return signal(num_nodes, 0) + owner * finished.size() + chunk;
  }
  // As many flags tell of what has come.
  MK_HOST_DEVICE int64_t num_signals(int nranks) const {
    return int64_t{num_nodes} * sums.size() + (finished_tile_bytes > 0 ? int64_t{nranks} * finished.size() : 0);
  }
};

// The order in which a rank computes tiles. First those of owners elsewhere, whose rows take turns, so that all
// reducers of a node have something to send from the start on, and the network is through with sums when what
// is finished begins to travel. Then those of this node's: the others are `lead` tiles ahead of this rank's
// own, which have to wait for what the others compute of them, and then they and this rank take turns, a block
// of each owner's.
struct NetworkTiles {
  int num_far;         // owners elsewhere
  int far_group_rows;  // rows of their tiles, in turn, that are walked before the next column
  OwnerTiles near;     // of the other owners of this node
  int lead;
  int rotation;  // from wave to wave of tiles, of the workers that they are dealt out to

  MK_HOST_DEVICE int size() const { return (num_far + near.num_owners + 1) * near.tiles_of_owner(); }
  MK_HOST_DEVICE int m_tile(const OwnerTile& tile) const { return near.m_tile(tile); }
  // What a worker computes after tile `number`. A rank's own tiles take longer, and a round may be as long as a
  // wave: the same workers would have them all.
  MK_HOST_DEVICE int after(int number, int num_workers) const {
    const int wave = number / num_workers;
    const int place = number - wave * num_workers + rotation;
    return (wave + 1) * num_workers + (place < num_workers ? place : place - num_workers);
  }

  MK_HOST_DEVICE OwnerTile at(int number) const {
    const int num_far_tiles = num_far * near.tiles_of_owner();
    return number < num_far_tiles ? far_at(number) : local_at(number - num_far_tiles);
  }

 private:
  MK_HOST_DEVICE OwnerTile far_at(int number) const {
    int row = 0, column = 0;
    TileRaster{num_far * near.tile_rows, near.num_n_tiles, far_group_rows}.place(number, &row, &column);
    const int index = row / num_far;
    return {row - index * num_far, index, column};
  }

  MK_HOST_DEVICE OwnerTile local_at(int number) const {
    const int num_near = near.size();
    const int block = near.block_rows * near.block_columns;
    int before = number;  // tiles of the others, of all before this one
    bool is_near = number < lead;
    if (!is_near) {
      const int per_round = (near.num_owners + 1) * block;
      const int round = (number - lead) / per_round;
      const int in_round = number - lead - round * per_round;
      const int in_near = in_round > block ? in_round - block : 0;
      before = static_cast<int>(min_of(num_near, lead + round * (per_round - block) + in_near));
      is_near = in_round >= block && before < num_near;
    }
    OwnerTile tile = is_near ? near.at(before) : near.of_owner(number - before);
    tile.position += is_near ? num_far : num_far + near.num_owners;
    return tile;
  }
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
