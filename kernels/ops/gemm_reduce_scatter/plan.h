// SPDX-License-Identifier: MIT
#pragma once

#include "../../../lib/status.h"
#include "../../operator_call.h"
#include "schedule.h"

namespace mk::gemm_reduce_scatter {

// What the host executor runs a call with. Pure.
Result<mk_plan_t> plan_host(const GemmCall& call, const TopologyView& view, int threads);
Schedule make_schedule(const GemmCall& call, const mk_plan_t& plan, const TopologyView& view);

// Bytes that this rank sends inside its node (partials) and to other nodes (node sums).
void count_bytes(const Schedule& schedule, mk_plan_t& plan);
// Tiles, chunks and threads, such that flags and signals for every chunk fit in a bank.
Result<mk_plan_t> plan_chunks(const GemmCall& call, const TopologyView& view, int threads, int flags_per_chunk,
                              int signals_per_chunk);
// Flags that a reducer needs for one chunk index: one for each owner it reduces and each local source.
int flags_a_chunk(const TopologyView& view);

}  // namespace mk::gemm_reduce_scatter
