// SPDX-License-Identifier: MIT
#pragma once

#include "../../../lib/status.h"
#include "../../operator_call.h"
#include "schedule.h"

namespace mk::allgather_gemm {

// What the host executor runs a call with. Pure.
Result<mk_plan_t> plan_host(const GemmCall& call, const TopologyView& view, int threads);
Schedule make_schedule(const GemmCall& call, const mk_plan_t& plan, const TopologyView& view);

// Bytes that this rank sends inside its node (own rows and rows relayed) and to other nodes.
void count_bytes(const Schedule& schedule, mk_plan_t& plan);

}  // namespace mk::allgather_gemm
