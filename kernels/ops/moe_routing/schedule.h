// SPDX-License-Identifier: MIT
// What both mixture-of-experts operators are made of: who owns which expert, the counts that ranks exchange
// before any row moves, what is decided from them, and how a list of rows is cut into chunks. Host and device.
//
// Every rank counts, for its own tokens, rows and tokens for each expert, rank and node, and sends these counts
// to all ranks: inside the node by stores, to each other node by one put to the rail peer, which copies them to
// its node. From the counts of all W ranks every rank computes the place of every row at every rank, and the
// same decision whether the launch can go on.
#pragma once

#include "../../protocol.h"

namespace mk::moe {

// What is wrong with a rank's own routing.
enum class Fault : int32_t {
  none = 0,
  bad_index = 1,   // neither -1 nor an expert
  duplicate = 2,   // an expert twice in a row
  bad_record = 3,  // not a record of this rank, communicator and these sizes
  no_rows = 4,     // a combine without rows, although the record has some
};

struct CountsHead {
  int32_t fault;  // Fault
  int32_t token;  // the first entry that is wrong
  int32_t k;
  int32_t has_record;  // `received` counts: this rank works from a record
  int64_t value;
  int64_t tokens;
  int64_t row_capacity;  // rows that this rank can take
  int64_t reserved;
};
static_assert(sizeof(CountsHead) == 48);

// What becomes of a launch, the same on every rank.
struct Verdict {
  enum Kind : int32_t { go = 0, fault, capacity, records_differ, workspace };
  int32_t kind = go;
  int32_t rank = -1;    // the first rank that it is about
  int32_t expert = -1;  // records_differ
  int64_t needed = 0;   // rows, or bytes of workspace
  int64_t available = 0;
};

// One (token, k) on its way: to row `slot` of those that the token's rank sends to `expert`.
struct RouteItem {
  int32_t expert;  // -1: none
  int32_t slot;
  int32_t rank_slot;  // the token's number among those that its rank sends to the expert's rank
  float factor;       // row_scale or topk_weights
};
struct RouteHead {
  int32_t token;
  int32_t reserved[3];
};
static_assert(sizeof(RouteItem) == 16 && sizeof(RouteHead) == 16);

struct Routing {
  TopologyView topology;
  int experts;
  int topk;
  int max_chunks;
  int max_local_nranks;  // of any node
  int64_t chunk_rows;
  const std::byte* blocks;  // counts of all ranks, at counts_offset() of a bank; null before they are here

  // --- experts: rank r owns [r * ceil(E/W), ...)
  MK_HOST_DEVICE int experts_per_rank() const { return static_cast<int>(ceil_div(experts, topology.nranks)); }
  MK_HOST_DEVICE int owner(int expert) const { return expert / experts_per_rank(); }
  MK_HOST_DEVICE int first_expert(int rank) const {
    return static_cast<int>(rows_begin(experts, topology.nranks, rank));
  }
  MK_HOST_DEVICE int num_experts(int rank) const {
    return static_cast<int>(rows_count(experts, topology.nranks, rank));
  }

  // --- a rank's block of counts: head, then int32_t arrays
  MK_HOST_DEVICE size_t block_bytes() const {
    const int64_t numbers =
        int64_t{experts} + 2 * topology.nranks + 2 * topology.num_nodes + experts_per_rank();
    return sizeof(CountsHead) + static_cast<size_t>(round_up(numbers * 4, 16));
  }
  MK_HOST_DEVICE size_t counts_offset(int source) const { return source * block_bytes(); }
  MK_HOST_DEVICE size_t counts_bytes() const {
    return static_cast<size_t>(round_up(static_cast<int64_t>(counts_offset(topology.nranks)), 128));
  }
  // Places in the int32_t array behind the head.
  MK_HOST_DEVICE int64_t expert_rows_at(int expert) const { return expert; }
  MK_HOST_DEVICE int64_t rank_rows_at(int rank) const { return int64_t{experts} + rank; }
  MK_HOST_DEVICE int64_t rank_tokens_at(int rank) const { return rank_rows_at(topology.nranks) + rank; }
  MK_HOST_DEVICE int64_t node_rows_at(int node) const { return rank_tokens_at(topology.nranks) + node; }
  MK_HOST_DEVICE int64_t node_tokens_at(int node) const { return node_rows_at(topology.num_nodes) + node; }
  MK_HOST_DEVICE int64_t received_at(int local_expert) const {
    return node_tokens_at(topology.num_nodes) + local_expert;
  }

  MK_HOST_DEVICE const CountsHead& head(int source) const {
    return *reinterpret_cast<const CountsHead*>(blocks + counts_offset(source));
  }
  MK_HOST_DEVICE int64_t number(int source, int64_t place) const {
    return reinterpret_cast<const int32_t*>(blocks + counts_offset(source) + sizeof(CountsHead))[place];
  }
  // Of `source`'s tokens: rows for an expert; rows and tokens for a rank; rows and tokens for a node.
  MK_HOST_DEVICE int64_t expert_rows(int source, int expert) const {
    return number(source, expert_rows_at(expert));
  }
  MK_HOST_DEVICE int64_t rank_rows(int source, int rank) const { return number(source, rank_rows_at(rank)); }
  MK_HOST_DEVICE int64_t rank_tokens(int source, int rank) const {
    return number(source, rank_tokens_at(rank));
  }
  MK_HOST_DEVICE int64_t node_rows(int source, int node) const { return number(source, node_rows_at(node)); }
  MK_HOST_DEVICE int64_t node_tokens(int source, int node) const {
    return number(source, node_tokens_at(node));
  }

  // --- order of rows at their expert's rank: expert, source rank, token
  MK_HOST_DEVICE int64_t rows_of_rank(int rank) const {
    int64_t rows = 0;
    for (int source = 0; source < topology.nranks; ++source) rows += rank_rows(source, rank);
    return rows;
  }
  MK_HOST_DEVICE int64_t rows_of_expert(int expert) const {
    int64_t rows = 0;
    for (int source = 0; source < topology.nranks; ++source) rows += expert_rows(source, expert);
    return rows;
  }

  // --- the rank of `node` that speaks for that node with `rank`, and which ranks one speaks for
  MK_HOST_DEVICE int relay(int rank, int node) const {
    return topology.node_of_rank[rank] == node ? rank : topology.rail_peer(rank, node);
  }
  MK_HOST_DEVICE bool relays(int relay_rank, int rank) const {
    return topology.node_of_rank[rank] != topology.node_of_rank[relay_rank] &&
           relay(rank, topology.node_of_rank[relay_rank]) == relay_rank;
  }
  // A number for `rank` at its relay in `node`, below num_nodes * ranks_per_relay(node).
  MK_HOST_DEVICE int ranks_per_relay(int node) const {
    return static_cast<int>(ceil_div(max_local_nranks, topology.node_nranks(node)));
  }
  MK_HOST_DEVICE int relay_index(int rank, int node) const {
    const int turn = topology.node_of_rank[rank] == node
                         ? 0
                         : topology.local_rank_of_rank[rank] / topology.node_nranks(node);
    return topology.node_of_rank[rank] * ranks_per_relay(node) + turn;
  }
  MK_HOST_DEVICE int relay_indices() const {
    int largest = 0;
    for (int node = 0; node < topology.num_nodes; ++node) {
      const int indices = topology.num_nodes * ranks_per_relay(node);
      if (indices > largest) largest = indices;
    }
    return largest;
  }

  // --- chunks of a list of `count` rows or tokens
  MK_HOST_DEVICE int64_t chunk_size(int64_t count) const {
    const int64_t least = ceil_div(count, max_chunks);
    return least > chunk_rows ? least : chunk_rows;
  }
  MK_HOST_DEVICE int chunks(int64_t count) const { return num_chunks(count, chunk_size(count)); }
  MK_HOST_DEVICE int chunk_of(int64_t count, int64_t index) const {
    return static_cast<int>(index / chunk_size(count));
  }
  MK_HOST_DEVICE int64_t chunk_begin(int64_t count, int chunk) const { return chunk * chunk_size(count); }
  MK_HOST_DEVICE int64_t chunk_count(int64_t count, int chunk) const {
    return min_of(chunk_size(count), count - chunk_begin(count, chunk));
  }

  // --- flags and signals: those of the counts come first
  MK_HOST_DEVICE int counts_flag(int source) const { return source; }
  MK_HOST_DEVICE int first_flag() const { return topology.nranks; }
  MK_HOST_DEVICE int counts_signal(int source) const { return kEntrySignals + source; }
  MK_HOST_DEVICE int first_signal() const { return kEntrySignals + topology.nranks; }

  MK_HOST_DEVICE size_t route_bytes() const { return sizeof(RouteHead) + topk * sizeof(RouteItem); }

  // Everything but the workspace, which depends on the operator. Faults come first: counts are meaningless
  // then.
  MK_HOST_DEVICE Verdict examine() const {
    Verdict verdict;
    for (int rank = 0; rank < topology.nranks; ++rank) {
      if (head(rank).fault == 0) continue;
      verdict.kind = Verdict::fault;
      verdict.rank = rank;
      return verdict;
    }
    for (int rank = 0; rank < topology.nranks; ++rank) {
      const int64_t rows = rows_of_rank(rank);
      if (rows > verdict.needed) verdict.needed = rows;
      if (rows <= head(rank).row_capacity || verdict.kind != Verdict::go) continue;
      verdict.kind = Verdict::capacity;
      verdict.rank = rank;
      verdict.available = head(rank).row_capacity;
    }
    if (verdict.kind != Verdict::go) return verdict;
    for (int expert = 0; expert < experts; ++expert) {
      const int rank = owner(expert);
      if (head(rank).has_record == 0) continue;
      const int64_t rows = rows_of_expert(expert);
      const int64_t recorded = number(rank, received_at(expert - first_expert(rank)));
      if (rows == recorded) continue;
      verdict.kind = Verdict::records_differ;
      verdict.rank = rank;
      verdict.expert = expert;
      verdict.needed = rows;
      verdict.available = recorded;
      return verdict;
    }
    return verdict;
  }
};

// The first rank whose part of a launch does not fit in a bank, if the verdict so far lets it go.
template <class Schedule>
MK_HOST_DEVICE Verdict decide(const Schedule& schedule, size_t bank_bytes) {
  Verdict verdict = schedule.routing.examine();
  for (int rank = 0; verdict.kind == Verdict::go && rank < schedule.routing.topology.nranks; ++rank) {
    const size_t needed = schedule.area_bytes(rank);
    if (needed <= bank_bytes) continue;
    verdict.kind = Verdict::workspace;
    verdict.rank = rank;
    verdict.needed = static_cast<int64_t>(needed);
    verdict.available = static_cast<int64_t>(bank_bytes);
  }
  return verdict;
}

}  // namespace mk::moe
