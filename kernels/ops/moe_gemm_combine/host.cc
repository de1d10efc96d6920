// SPDX-License-Identifier: MIT
// MoE GEMM + combine on the host executor: copy, send, receive, compute and reduce roles.
#include <memory>

#include "../../host/host_operator.h"
#include "../moe_routing/host_routing.h"
#include "host_products.h"
#include "host_sums.h"
#include "plan.h"

namespace mk::moe_gemm_combine {
namespace {

struct State {
  HostLaunch& launch;
  Schedule schedule;
  moe::HostRouting routing;
  HostProducts products;
  HostSums sums;

  explicit State(HostLaunch& in)
      : launch(in),
        schedule(make_schedule(in.moe(), in.plan, in.view())),
        routing(in, schedule.routing,
                [this](const moe::Routing& counted) {
                  schedule.routing = counted;
                  return moe::decide(schedule, launch.area_bytes());
                }),
        products(in, schedule),
        sums(in, schedule, routing) {}
};

// The routes of this rank's tokens, weights included, to the rail peer in each node that they went to.
void run_send(State& state, Waiter& waiter) {
  if (!state.routing.send_counts(waiter) || !state.routing.await_verdict(waiter)) return;
  const HostLaunch& launch = state.launch;
  const TopologyView& view = launch.view();
  const Schedule& schedule = state.schedule;
  for (int step = 1; step < view.num_nodes; ++step) {
    const int node = (view.node() + step) % view.num_nodes;
    const std::vector<int32_t>& tokens = state.routing.tokens_to_node(node);
    const auto total = static_cast<int64_t>(tokens.size());
    const int relay = schedule.collector(view.rank, node);
    for (int chunk = 0; chunk < schedule.routing.chunks(total); ++chunk) {
      const int64_t begin = schedule.routing.chunk_begin(total, chunk);
      const int64_t count = schedule.routing.chunk_count(total, chunk);
      const HostSpan span(waiter.track(), TraceKind::send, chunk, relay);
      for (int64_t i = begin; i < begin + count; ++i) {
        state.routing.write_route(tokens[static_cast<size_t>(i)],
                                  launch.area(schedule.route_send_offset(view.rank, node, i)));
      }
      if (!waiter.put(relay, launch.area_address(schedule.route_send_offset(view.rank, node, begin)),
                      launch.area_address(schedule.route_offset(relay, view.rank, begin)),
                      static_cast<size_t>(count) * schedule.routing.route_bytes(),
                      schedule.route_signal(view.rank, node, chunk))) {
        return;
      }
    }
  }
}

std::vector<Role> make_roles(HostLaunch& launch) {
  auto state = std::make_shared<State>(launch);
  std::vector<Role> roles;
  roles.emplace_back("copy", [state](Waiter& waiter) {
    const HostSpan span(waiter.track(), TraceKind::copy, -1);
    state->routing.publish();
  });
  roles.emplace_back("receive", [state](Waiter& waiter) {
    state->routing.receive_counts(waiter, [&] {
      if (state->routing.verdict().kind == moe::Verdict::go) state->products.prepare();
    });
  });
  if (launch.view().num_nodes > 1) {
    roles.emplace_back("send", [state](Waiter& waiter) { run_send(*state, waiter); });
  }
  roles.emplace_back("reduce", [state](Waiter& waiter) {
    if (state->routing.await_verdict(waiter)) state->sums.run_reduce(waiter);
  });
  for (int thread = 0; thread < launch.plan.compute_ctas; ++thread) {
    roles.emplace_back("compute", [state](Waiter& waiter) {
      if (state->routing.await_verdict(waiter)) state->products.run_compute(waiter);
    });
  }
  return roles;
}

}  // namespace
}  // namespace mk::moe_gemm_combine

const mk::HostOperator mk::kHostMoeGemmCombine = {MK_OPERATOR_MOE_GEMM_COMBINE,
                                                  mk::plan_call<mk::MoeCall, mk::moe_gemm_combine::plan_host>,
                                                  mk::moe_gemm_combine::make_roles};
