// SPDX-License-Identifier: MIT
#include "plan.h"

#include <algorithm>

#include "../moe_routing/plan.h"

namespace mk::moe_gemm_combine {

Schedule make_schedule(const MoeCall& call, const mk_plan_t& plan, const TopologyView& view) {
  return {moe::make_routing(call, plan, view), call.hidden, element_bytes(call.out_dtype)};
}

Result<mk_plan_t> plan_host(const MoeCall& call, const TopologyView& view, int threads) {
  const Schedule shape = make_schedule(call, MK_PLAN_INIT, view);
  const auto row = static_cast<int64_t>(shape.row_bytes());
  const int indices = shape.routing.relay_indices();
  Result<mk_plan_t> chosen = moe::plan_chunks(
      call, view, threads, row, indices * shape.routing.max_local_nranks, indices + view.num_nodes);
  if (!chosen.ok()) return chosen;
  mk_plan_t& plan = chosen.value();
  plan.reduce_ctas = 1;
  const auto route = static_cast<int64_t>(shape.routing.route_bytes());
  const int64_t nodes = std::min(call.topk, view.num_nodes - 1);
  plan.link_bytes = view.nranks > 1 ? call.tokens * call.topk * row : 0;
  plan.network_bytes = call.tokens * nodes * (row + route);
  return chosen;
}

}  // namespace mk::moe_gemm_combine
