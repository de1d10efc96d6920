// SPDX-License-Identifier: MIT
// Ring attention: which positions of the sequence a rank holds and a query sees, which chunks of keys and
// values go to whom, where they land, which flag says so, and in which order a query takes them. Host and
// device.
//
// A rank's key and value rows are cut into chunks. Inside a node a rank pushes each chunk to every other rank
// that needs it; into each other node that needs it it is put once, to the rail peer there, which forwards it
// inside that node. A query takes the chunks that it sees in the order of source_at, and of a source in
// ascending order: partial results are merged in this order, whenever they were computed.
#pragma once

#include "../../protocol.h"

namespace mk::ring_attention {

// The sequence, cut into slices. Positions count over all ranks; with packed sequences over all of them.
struct Slices {
  int64_t seq;
  int nranks;
  bool causal;
  bool zigzag;
  int num_sequences;          // packed, 0: one, which is the whole
  const int32_t* cu_seqlens;  // [num_sequences + 1] in memory of the executor, checked

  MK_HOST_DEVICE int sequences() const { return num_sequences > 0 ? num_sequences : 1; }
  MK_HOST_DEVICE int64_t sequence_begin(int sequence) const {
    return num_sequences > 0 ? cu_seqlens[sequence] : sequence == 0 ? 0 : seq;
  }
  // The sequence that `position` lies in; empty ones lie nowhere.
  MK_HOST_DEVICE int sequence_at(int64_t position) const {
    int low = 0;
    int high = sequences();
    while (high - low > 1) {
      const int middle = low + (high - low) / 2;
      if (sequence_begin(middle) <= position) {
        low = middle;
      } else {
        high = middle;
      }
    }
    return low;
  }
  // A query sees the positions [visible_begin, visible_end). Both grow with its own position.
  MK_HOST_DEVICE int64_t visible_begin(int64_t position) const { return sequence_begin(sequence_at(position)); }
  MK_HOST_DEVICE int64_t visible_end(int64_t position) const {
    return causal ? position + 1 : sequence_begin(sequence_at(position) + 1);
  }

  // A rank's rows, in their order, are runs of consecutive positions: one; with zigzag two of each sequence, of
  // which it holds slices r and 2W-1-r of 2W. Positions grow with the row.
  MK_HOST_DEVICE int64_t runs() const { return zigzag ? int64_t{2} * sequences() : 1; }
  MK_HOST_DEVICE int64_t run_begin(int rank, int64_t run) const {
    if (!zigzag) return rows_begin(seq, nranks, rank);
    const int sequence = static_cast<int>(run / 2);
    const int64_t begin = sequence_begin(sequence);
    return begin + rows_begin(sequence_begin(sequence + 1) - begin, 2 * nranks, zigzag_slice(rank, run));
  }
  MK_HOST_DEVICE int64_t run_count(int rank, int64_t run) const {
    if (!zigzag) return rows_count(seq, nranks, rank);
    const int sequence = static_cast<int>(run / 2);
    return rows_count(sequence_begin(sequence + 1) - sequence_begin(sequence), 2 * nranks,
                      zigzag_slice(rank, run));
  }
  MK_HOST_DEVICE int zigzag_slice(int rank, int64_t run) const {
    return run % 2 == 0 ? rank : 2 * nranks - 1 - rank;
  }
  MK_HOST_DEVICE int64_t rows(int rank) const {
    int64_t total = 0;
    for (int64_t run = 0; run < runs(); ++run) total += run_count(rank, run);
    return total;
  }
  MK_HOST_DEVICE int64_t position(int rank, int64_t row) const {
    for (int64_t run = 0; run < runs(); ++run) {
      if (row < run_count(rank, run)) return run_begin(rank, run) + row;
      row -= run_count(rank, run);
    }
    return seq;
  }
};

// No rank has more rows, whatever the mode: of each of n sequences of L positions zigzag gives a rank at most
// 2 * ceil(L / 2W). Grows with seq and n.
MK_HOST_DEVICE constexpr int64_t most_rows(int64_t seq, int nranks, int num_sequences) {
  const int64_t slices = int64_t{2} * nranks;
  const int64_t sequences = num_sequences > 0 ? num_sequences : 1;
  return min_of(seq, 2 * ((seq + sequences * (slices - 1)) / slices));
}

struct Schedule {
  TopologyView topology;
  Slices slices;
  const int64_t* rows_of_rank;  // [nranks], slices.rows of each
  int64_t batch;
  int kv_heads;
  int dim;
  int64_t chunk_rows;
  int64_t slot_rows;  // most_rows
  int max_chunks;

  MK_HOST_DEVICE int64_t rows(int source) const { return rows_of_rank[source]; }
  MK_HOST_DEVICE int chunks(int source) const { return num_chunks(rows(source), chunk_rows); }
  MK_HOST_DEVICE int64_t chunk_begin(int chunk) const { return chunk * chunk_rows; }  // a row of its source
  MK_HOST_DEVICE int64_t chunk_count(int source, int chunk) const {
    return min_of(chunk_rows, rows(source) - chunk_begin(chunk));
  }

  // Receive area: a slot for each source, in it chunk after chunk, in a chunk [K, V][batch][kv_head][row][dim].
  MK_HOST_DEVICE size_t row_bytes() const {  // K and V of a row, of all batches and heads
    return static_cast<size_t>(batch) * kv_heads * dim * 2 * sizeof(uint16_t);
  }
  MK_HOST_DEVICE size_t slot_bytes() const { return static_cast<size_t>(slot_rows) * row_bytes(); }
  MK_HOST_DEVICE size_t area_bytes() const {
    return topology.nranks > 1 ? static_cast<size_t>(topology.nranks) * slot_bytes() : 0;
  }
  MK_HOST_DEVICE size_t chunk_offset(int source, int chunk) const {
    return static_cast<size_t>(source) * slot_bytes() + static_cast<size_t>(chunk_begin(chunk)) * row_bytes();
  }
  // Elements from the start of a chunk of `count` rows to a head's first; value: V and not K.
  MK_HOST_DEVICE int64_t head_offset(bool value, int64_t batch_index, int kv_head, int64_t count) const {
    return (((value ? batch : 0) + batch_index) * kv_heads + kv_head) * count * dim;
  }

  // Flag and signal of a chunk of `source`, at every receiver the same.
  MK_HOST_DEVICE int flag(int source, int chunk) const { return source * max_chunks + chunk; }
  MK_HOST_DEVICE int num_flags() const { return topology.nranks * max_chunks; }
  MK_HOST_DEVICE int signal(int source, int chunk) const { return kEntrySignals + flag(source, chunk); }

  // The rank that writes `source`'s chunks into `receiver`'s memory: the source itself inside a node, else its
  // rail peer in the receiver's node (which is the receiver when the put comes straight from the network).
  MK_HOST_DEVICE int writer(int source, int receiver) const {
    const int node = topology.node_of_rank[receiver];
    return topology.node_of_rank[source] == node ? source : topology.rail_peer(source, node);
  }
  MK_HOST_DEVICE bool relays(int source) const {
    return !topology.is_local(source) && writer(source, topology.rank) == topology.rank;
  }

  // Does a chunk of `source` travel to `receiver`? Whenever one of its queries sees one of the chunk's keys;
  // sequences packed zigzag are spread over all ranks, and their chunks go to every rank that has queries.
  MK_HOST_DEVICE bool needs(int receiver, int source, int chunk) const {
    if (rows(receiver) == 0 || chunk >= chunks(source)) return false;
    if (receiver == source) return true;
    if (slices.zigzag) {
      return slices.num_sequences > 0 ||
             slices.position(receiver, rows(receiver) - 1) >= slices.position(source, chunk_begin(chunk));
    }
    const int64_t first_key = slices.run_begin(source, 0) + chunk_begin(chunk);
    const int64_t last_key = first_key + chunk_count(source, chunk) - 1;
    const int64_t first_query = slices.run_begin(receiver, 0);
    const int64_t last_query = first_query + rows(receiver) - 1;
    if (receiver > source) return slices.sequence_at(last_key) == slices.sequence_at(first_query);
    return !slices.causal && slices.sequence_at(last_query) == slices.sequence_at(first_key);
  }
  // Does it enter `node`?
  MK_HOST_DEVICE bool node_needs(int node, int source, int chunk) const {
    for (int local_rank = 0; local_rank < topology.node_nranks(node); ++local_rank) {
      if (needs(topology.rank_at(node, local_rank), source, chunk)) return true;
    }
    return false;
  }

  // The order in which this rank's queries take sources: own keys, the node's, the next nodes'.
  MK_HOST_DEVICE int source_at(int position) const { return topology.rotated(position); }
};

}  // namespace mk::ring_attention
