// SPDX-License-Identifier: MIT
// What the tests of plans between GPUs have in common.
#pragma once

#include "kernels/cuda/rank_gemm_plan.h"
#include "test/support/catch.h"

namespace mk::test {

constexpr int NUM_SMS = 132;

inline GemmCall make_call(mk_operator_t op, int64_t m, int64_t n, int64_t k) {
  GemmCall call;
  call.op = op;
  call.m = m, call.n = n, call.k = k;
  call.dtype = call.out_dtype = call.comm_dtype = MK_DTYPE_BF16;
  call.b_layout = MK_LAYOUT_KN;
  return call;
}

inline RankGemmPlan plan_of(const GemmCall& call, int rank, int nranks) {
  const Result<RankGemmPlan> plan = rank_gemm_plan(call, rank, nranks, NUM_SMS);
  REQUIRE(plan.ok());
  return plan.value();
}

inline int64_t num_cluster_tiles(const GemmCall& call, const GemmPlan& plan) {
  GemmShape shape;
  shape.m = call.m;
  shape.n = call.n;
  return gemm_plan_num_tiles(shape, plan);
}

}  // namespace mk::test
