// SPDX-License-Identifier: MIT
// The way of expert rows between the ranks, worked out on the host from the whole batch's routing: what a call
// site has to know before it calls NCCL.
#pragma once

#include <cstdint>
#include <vector>

#include "moe_routing.h"

namespace perf {

// Rows of the stage, one after another, that go to a rank or come from it.
struct RowsMessage {
  int peer;
  int64_t first;
  int64_t rows;
  bool operator==(const RowsMessage&) const = default;
};

// In the order of peers, then of experts; two ranks list the same messages between them in the same order.
struct RowsMessages {
  std::vector<RowsMessage> away;    // rows of this rank's tokens, by experts of others
  std::vector<RowsMessage> guests;  // rows of others' tokens, by this rank's experts
};

// A dispatch sends what is away and receives guests; a combine the other way round. All rows are in one buffer,
// the stage, in three parts:
//   expert rows: all of this rank's experts, by expert, then token; what the product reads or writes
//   away rows: of this rank's tokens by other ranks' experts, by rank, then expert, then token
//   guest rows: the expert rows of other ranks' tokens once more, by rank, then expert, then token
// A row of this rank's token by an expert of its own is among the expert rows alone.
struct ExpertExchange {
  int64_t tokens = 0;  // of this rank
  int64_t expert_rows = 0;
  int64_t away_rows = 0;
  int64_t guest_rows = 0;
  std::vector<int64_t> expert_counts;  // [local experts] rows of each
  std::vector<int64_t> places;         // [tokens, topk] row of the stage
  std::vector<int64_t> guest_places;   // [guest rows] the same row among the expert rows
  RowsMessages by_rank;                // one a peer, in guest rows: a copy from or to the expert rows beside it
  RowsMessages by_expert;              // one a peer and expert, in expert rows: no copy, but more messages

  int64_t first_guest() const { return expert_rows + away_rows; }
  int64_t stage_rows() const { return expert_rows + away_rows + guest_rows; }
};

ExpertExchange make_expert_exchange(const ExpertRouting& routing, int rank, int nranks);

// Rows to or from other ranks, whichever are more, of the rank that has most of them. A token counts once for
// each other rank that it has experts on (`once_a_rank`), or once for each expert there.
int64_t busiest_link_rows(const ExpertRouting& routing, int nranks, bool once_a_rank);

}  // namespace perf
