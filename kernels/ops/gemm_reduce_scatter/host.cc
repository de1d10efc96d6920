// SPDX-License-Identifier: MIT
// GEMM+ReduceScatter on the host executor.
#include <memory>

#include "../../host/host_operator.h"
#include "../../host/number_format.h"
#include "host_reduction.h"
#include "plan.h"

namespace mk::gemm_reduce_scatter {
namespace {

void store_row(const GemmCall& call, int64_t row, const float* sums) {
  for (int64_t column = 0; column < call.n; ++column) {
    float value = sums[column];
    const int64_t place = row * call.ldc + column;
    if (call.bias) value += load_element(call.bias, call.bias_dtype, column);
    if (call.accumulate) value += load_element(call.c, call.out_dtype, place);
    store_element(call.c, call.out_dtype, place, value);
  }
}

std::vector<Role> make_roles(HostLaunch& launch) {
  std::vector<Role> roles;
  if (launch.gemm().m == 0 || launch.gemm().n == 0) return roles;
  const GemmCall& call = launch.gemm();
  auto state = std::make_shared<HostReduction>(
      launch, make_schedule(call, launch.plan, launch.view()),
      [&call](int64_t row, const float* sums) { store_row(call, row, sums); },
      [&launch](int) { launch.tile_done(launch.view().rank); });
  roles.emplace_back("reduce", [state](Waiter& waiter) { state->run_reduce(waiter); });
  for (int thread = 0; thread < launch.plan.compute_ctas; ++thread) {
    roles.emplace_back("compute", [state](Waiter& waiter) { state->run_compute(waiter); });
  }
  return roles;
}

}  // namespace
}  // namespace mk::gemm_reduce_scatter

const mk::HostOperator mk::kHostGemmReduceScatter = {
    MK_OPERATOR_GEMM_REDUCE_SCATTER, mk::plan_call<mk::GemmCall, mk::gemm_reduce_scatter::plan_host>,
    mk::gemm_reduce_scatter::make_roles};
