// SPDX-License-Identifier: MIT
#pragma once

#include <vector>

#include "host_launch.h"

namespace mk {

// One row of the host executor's operator table.
struct HostOperator {
  mk_operator_t op;
  // Pure: what a call runs with on a rank with `threads` compute threads; needs no buffer pointers.
  Result<mk_plan_t> (*plan)(const OperatorCall& call, const TopologyView& view, int threads);
  // The threads of a launch besides the entry role. What they share lives as long as the functions do.
  std::vector<Role> (*roles)(HostLaunch& launch);
};

// The plan function of an operator whose calls are of kind Call.
template <class Call, Result<mk_plan_t> (*PLAN)(const Call&, const TopologyView&, int)>
Result<mk_plan_t> plan_call(const OperatorCall& call, const TopologyView& view, int threads) {
  return PLAN(std::get<Call>(call), view, threads);
}

extern const HostOperator kHostAllgatherGemm;
extern const HostOperator kHostGemmReduceScatter;
extern const HostOperator kHostGemmAllreduce;
extern const HostOperator kHostRingAttention;
extern const HostOperator kHostRingAttentionBackward;
extern const HostOperator kHostMoeDispatchGemm;
extern const HostOperator kHostMoeGemmCombine;

// nullptr: the host executor does not have it.
const HostOperator* host_operator(mk_operator_t op);

}  // namespace mk
