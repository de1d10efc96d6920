// SPDX-License-Identifier: MIT
// What the planners of the mixture-of-experts operators share.
#pragma once

#include "../../../lib/status.h"
#include "../../operator_call.h"
#include "schedule.h"

namespace mk::moe {

// Tiles, threads and chunks of rows of `row_bytes`, with flags and signals for every chunk in a bank.
Result<mk_plan_t> plan_chunks(const MoeCall& call, const TopologyView& view, int threads, int64_t row_bytes,
                              int flags_per_chunk, int signals_per_chunk);
// Without counts: those arrive in the launch.
Routing make_routing(const MoeCall& call, const mk_plan_t& plan, const TopologyView& view);

// What the routing of calls within some maxima can ask of one rank at most.
struct Bounds {
  int64_t received_rows = 0;    // rows of its experts
  int64_t collected_rows = 0;   // rows of the experts of its node, for the homes it collects for
  int64_t relayed_tokens = 0;   // tokens of other nodes' ranks that it relays
  int64_t remote_tokens = 0;    // its own tokens, once for each other node that they go to
  int64_t tokens_per_node = 0;  // of one rank to one node
};
Bounds bounds_of(const MoeCall& maxima, const TopologyView& view);

// Of both banks: the larger need of the two operators, since they share what was prepared.
Result<uint64_t> workspace_bytes(const MoeCall& maxima, const Routing& routing);

}  // namespace mk::moe
