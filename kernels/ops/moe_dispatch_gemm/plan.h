// SPDX-License-Identifier: MIT
#pragma once

#include "../../../lib/status.h"
#include "../../operator_call.h"
#include "schedule.h"

namespace mk::moe_dispatch_gemm {

// What the host executor runs a call with. Pure.
Result<mk_plan_t> plan_host(const MoeCall& call, const TopologyView& view, int threads);
Schedule make_schedule(const MoeCall& call, const mk_plan_t& plan, const TopologyView& view);

}  // namespace mk::moe_dispatch_gemm
