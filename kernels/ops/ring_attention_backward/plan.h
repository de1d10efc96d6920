// SPDX-License-Identifier: MIT
#pragma once

#include "../ring_attention/plan.h"
#include "schedule.h"

namespace mk::ring_attention_backward {

// What the host executor runs a call with. Pure.
Result<mk_plan_t> plan_host(const RingAttentionCall& call, const TopologyView& view, int threads);
Schedule make_schedule(const RingAttentionCall& call, const mk_plan_t& plan,
                       const ring_attention::Schedule& gather);

}  // namespace mk::ring_attention_backward
