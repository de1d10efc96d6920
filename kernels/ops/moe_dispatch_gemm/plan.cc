// SPDX-License-Identifier: MIT
#include "plan.h"

#include <algorithm>

#include "../moe_routing/plan.h"

namespace mk::moe_dispatch_gemm {

Schedule make_schedule(const MoeCall& call, const mk_plan_t& plan, const TopologyView& view) {
  return {moe::make_routing(call, plan, view), call.hidden};
}

Result<mk_plan_t> plan_host(const MoeCall& call, const TopologyView& view, int threads) {
  const Schedule shape = make_schedule(call, MK_PLAN_INIT, view);
  const auto packet = static_cast<int64_t>(shape.packet_bytes());
  Result<mk_plan_t> chosen =
      moe::plan_chunks(call, view, threads, packet, view.nranks, shape.routing.relay_indices());
  if (!chosen.ok()) return chosen;
  mk_plan_t& plan = chosen.value();
  // Each token to as many other ranks and nodes as it has experts.
  plan.link_bytes = call.tokens * std::min(call.topk, view.local_nranks() - 1) * packet;
  plan.network_bytes = call.tokens * std::min(call.topk, view.num_nodes - 1) * packet;
  return chosen;
}

}  // namespace mk::moe_dispatch_gemm
