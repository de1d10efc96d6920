// SPDX-License-Identifier: MIT
// AllGather+GEMM: who sends which rows of A to whom, where they land, which flag says so, and in which order
// the tiles of C are computed. Host and device.
//
// Inside a node a rank pushes each chunk of its rows to every other rank. To each other node it puts each chunk
// once, to its rail peer there, which forwards it inside that node. Rows land at their place in the gathered
// matrix, in the receive area of the epoch's bank (or straight in the caller's gathered A when writer and
// receiver both placed it at the same offset of symmetric memory).
//
// In mode WGRAD the rows of X travel in the same way; they are the inner dimension of the product, so that
// every tile of C needs every chunk. A tile has one sum a source, over that source's rows in their order; the
// sums are added in the order of source_at.
#pragma once

#include "../../protocol.h"

namespace mk::allgather_gemm {

struct Schedule {
  TopologyView topology;
  int64_t m;           // rows over all ranks
  int64_t k;           // elements a row (of A; of X in mode WGRAD)
  int64_t chunk_rows;  // rows a transfer unit
  int64_t tile_m;      // rows a tile of C; tiles do not cross the border between two ranks' rows
  int max_chunks;      // of any rank

  // Receive area: the gathered matrix with rows of 16-bit elements at a 16-byte aligned pitch.
  MK_HOST_DEVICE size_t row_bytes() const { return static_cast<size_t>(k) * 2; }
  MK_HOST_DEVICE size_t row_pitch() const { return static_cast<size_t>(round_up(k * 2, 16)); }
  MK_HOST_DEVICE size_t area_bytes() const { return static_cast<size_t>(m) * row_pitch(); }
  MK_HOST_DEVICE size_t area_offset(int source, int chunk) const {
    return static_cast<size_t>(chunk_begin(source, chunk)) * row_pitch();
  }

  MK_HOST_DEVICE int64_t rows(int source) const { return rows_count(m, topology.nranks, source); }
  MK_HOST_DEVICE int chunks(int source) const { return num_chunks(rows(source), chunk_rows); }
  MK_HOST_DEVICE int64_t chunk_begin(int source, int chunk) const {  // a row of the gathered matrix
    return rows_begin(m, topology.nranks, source) + chunk * chunk_rows;
  }
  MK_HOST_DEVICE int64_t chunk_count(int source, int chunk) const {
    return min_of(chunk_rows, rows(source) - chunk * chunk_rows);
  }

  // Flag and signal of a chunk of `source`, at every receiver the same.
  MK_HOST_DEVICE int flag(int source, int chunk) const { return source * max_chunks + chunk; }
  MK_HOST_DEVICE int signal(int source, int chunk) const { return kEntrySignals + flag(source, chunk); }

  // The rank that writes `source`'s rows into `receiver`'s memory: the source itself inside a node, else the
  // source's rail peer in the receiver's node (which is the receiver when the put comes straight from the
  // network).
  MK_HOST_DEVICE int writer(int source, int receiver) const {
    const int node = topology.node_of_rank[receiver];
    return topology.node_of_rank[source] == node ? source : topology.rail_peer(source, node);
  }
  // Does this rank take `source`'s rows from the network and forward them inside its node?
  MK_HOST_DEVICE bool relays(int source) const {
    return !topology.is_local(source) && writer(source, topology.rank) == topology.rank;
  }

  // Mode FORWARD, tiles: first those of the rows at hand, then by distance; rows of one source before the next.
  MK_HOST_DEVICE int source_at(int position) const { return topology.rotated(position); }
  MK_HOST_DEVICE int64_t tile_rows(int source) const { return ceil_div(rows(source), tile_m); }
  // The chunks [first, last] that tile row `tile` of `source` needs.
  MK_HOST_DEVICE int tile_first_chunk(int64_t tile) const {
    return static_cast<int>(tile * tile_m / chunk_rows);
  }
  MK_HOST_DEVICE int tile_last_chunk(int source, int64_t tile) const {
    return static_cast<int>((min_of((tile + 1) * tile_m, rows(source)) - 1) / chunk_rows);
  }
};

}  // namespace mk::allgather_gemm
