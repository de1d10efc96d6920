// SPDX-License-Identifier: MIT
#pragma once

#include <vector>

#include "../../../lib/status.h"
#include "../../operator_call.h"
#include "schedule.h"

namespace mk::ring_attention {

// Rows of a tile of queries and of a block of keys on the host executor, at most.
inline constexpr int kMostTileRows = 64;

// What the host executor runs a call with. Pure.
Result<mk_plan_t> plan_host(const RingAttentionCall& call, const TopologyView& view, int threads);

// The slices of a call. A plan looks at no pointer: there a packed call counts as one sequence.
Slices make_slices(const RingAttentionCall& call, const TopologyView& view, bool packed);
std::vector<int64_t> count_rows(const Slices& slices);
// `rows_of_rank`, from count_rows, has to outlive the schedule.
Schedule make_schedule(const RingAttentionCall& call, const mk_plan_t& plan, const TopologyView& view,
                       const Slices& slices, const std::vector<int64_t>& rows_of_rank);

// Tiles, chunks and threads, such that flags and signals for every chunk fit in a bank and no put is too large.
// chunk_row_bytes: of the widest row that travels.
Result<mk_plan_t> plan_chunks(const RingAttentionCall& call, const TopologyView& view, int threads,
                              int flags_per_chunk, int signals_per_chunk, int64_t chunk_row_bytes);
// Bytes of keys and values that this rank sends inside its node (own and relayed) and to other nodes.
void count_bytes(const Schedule& schedule, mk_plan_t& plan);

}  // namespace mk::ring_attention
