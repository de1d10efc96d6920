// SPDX-License-Identifier: MIT
// The plan of the GEMM operators between GPUs: what all ranks must choose alike, and that memory prepared for
// the largest call serves every smaller one. Operator by operator: allgather_gemm_plan_test.cc,
// gemm_reduction_plan_test.cc; between nodes: rank_gemm_network_plan_test.cc.
#include <algorithm>
#include <random>

#include "rank_gemm_plans.h"

using namespace mk;
using namespace mk::test;

TEST_CASE("an area prepared for the largest call serves every smaller one") {
  std::mt19937 random(1);
  const auto below = [&](int64_t limit) { return std::uniform_int_distribution<int64_t>(0, limit)(random); };
  for (const mk_operator_t op :
       {MK_OPERATOR_ALLGATHER_GEMM, MK_OPERATOR_GEMM_REDUCE_SCATTER, MK_OPERATOR_GEMM_ALLREDUCE}) {
    for (int turn = 0; turn < 3000; ++turn) {
      const int nranks = 2 + static_cast<int>(below(6));
      const GemmCall largest = make_call(op, below(9000), below(9000), below(9000));
      GemmCall call = make_call(op, below(largest.m), below(largest.n), below(largest.k));
      if (turn % 3 == 0) call.m = std::min<int64_t>(largest.m, below(300));
      const RankGemmPlan plan = plan_of(call, 0, nranks);
      INFO(operator_name(op) << " of " << nranks << ": m " << call.m << " n " << call.n << " of " << largest.m
                             << ", " << largest.n);
      CHECK(plan.area_bytes <= plan_of(largest, 0, nranks).area_bytes);
      // And what the kernel addresses lies inside.
      if (op != MK_OPERATOR_ALLGATHER_GEMM) {
        const int64_t slots = nranks * plan.slot_bytes;
        CHECK(slots <= plan.area_bytes);
        if (plan.reduction == gemm_reduce_scatter::Reduction::two_shot) {
          CHECK(slots <= plan.gather_begin);
          CHECK(plan.gather_begin + call.m * plan.gather_pitch <= plan.area_bytes);
        }
      }
    }
  }
}

TEST_CASE("one CTA is enough for a launch") {
  for (const mk_operator_t op :
       {MK_OPERATOR_ALLGATHER_GEMM, MK_OPERATOR_GEMM_REDUCE_SCATTER, MK_OPERATOR_GEMM_ALLREDUCE}) {
    GemmCall call = make_call(op, 4096, 2048, 1024);
    for (const int copy_ctas : {0, 3}) {
      call.tuning.copy_ctas = copy_ctas;
      const Result<RankGemmPlan> plan = rank_gemm_plan(call, 0, 4, 1);
      REQUIRE(plan.ok());
      CHECK(plan.value().plan.compute_ctas == 1);
      CHECK(plan.value().plan.copy_ctas == 0);
    }
  }
}

TEST_CASE("ranks with different k, layouts or row counts agree on how partial sums travel") {
  for (const int64_t m : {1, 16, 200, 1000, 4096, 9001}) {
    for (const int64_t n : {4000, 7168}) {
      for (const mk_operator_t op : {MK_OPERATOR_GEMM_REDUCE_SCATTER, MK_OPERATOR_GEMM_ALLREDUCE}) {
        for (const int nranks : {4, 8}) {
          const RankGemmPlan first = plan_of(make_call(op, m, n, 512), 0, nranks);
          GemmCall call = make_call(op, m, n, 20000);
          call.b_layout = MK_LAYOUT_NK;
          const RankGemmPlan last = plan_of(call, nranks - 1, nranks);
          CHECK(first.gemm.block_m == last.gemm.block_m);
          CHECK(first.gemm.block_n == last.gemm.block_n);
          CHECK(first.reduction == last.reduction);
          CHECK(first.slot_bytes == last.slot_bytes);
          CHECK(first.gather_begin == last.gather_begin);
        }
      }
    }
  }
}

TEST_CASE("tuning sets the numbers of CTAs") {
  GemmCall call = make_call(MK_OPERATOR_ALLGATHER_GEMM, 16384, 4096, 4096);
  call.tuning.compute_ctas = 100;
  call.tuning.copy_ctas = 5;
  CHECK(plan_of(call, 0, 4).plan.compute_ctas == 100);
  CHECK(plan_of(call, 0, 4).plan.copy_ctas == 5);
  call.tuning.compute_ctas = 1000;
  CHECK(plan_of(call, 0, 4).plan.compute_ctas == NUM_SMS - 5);
  // Push CTAs that the plan adds do not come out of those asked for.
  call = make_call(MK_OPERATOR_ALLGATHER_GEMM, 16384, 4096, 16384);
  call.tuning.compute_ctas = 100;
  CHECK(plan_of(call, 0, 4).plan.compute_ctas == 100);
  CHECK(plan_of(call, 0, 4).plan.copy_ctas > 0);
  call.op = MK_OPERATOR_GEMM_ALLREDUCE;
  call.tuning.compute_ctas = 7;
  CHECK(plan_of(call, 0, 4).plan.compute_ctas == 7);
  CHECK(plan_of(call, 0, 4).plan.copy_ctas == 0);
}

TEST_CASE("what a launch has no flags for is refused") {
  const Result<RankGemmPlan> plan = rank_gemm_plan(
      make_call(MK_OPERATOR_GEMM_REDUCE_SCATTER, int64_t{1} << 20, int64_t{1} << 16, 64), 0, 4, NUM_SMS);
  REQUIRE(!plan.ok());
  CHECK(plan.status().code() == MK_ERROR_UNSUPPORTED);
}

TEST_CASE("a tile that no kernel has is refused") {
  GemmCall call = make_call(MK_OPERATOR_ALLGATHER_GEMM, 512, 512, 512);
  call.tuning.tile_m = 96;
  const Result<RankGemmPlan> plan = rank_gemm_plan(call, 0, 4, NUM_SMS);
  REQUIRE(!plan.ok());
  CHECK(plan.status().code() == MK_ERROR_UNSUPPORTED);
}

TEST_CASE("where clusters have several swapped tiles, an all-gather cuts some along k, and a reduction none") {
  constexpr GemmClusterLimits H200 = {{0, 0, 66, 39, 30}};
  for (const mk_operator_t op : {MK_OPERATOR_ALLGATHER_GEMM, MK_OPERATOR_GEMM_REDUCE_SCATTER}) {
    for (const auto& [m, n] : {std::pair{420, 14336}, {300, 28672}}) {
      const GemmCall call = make_call(op, m, n, 8192);
      const GemmPlan plan = rank_gemm_plan(call, 0, 2, NUM_SMS, nullptr, H200).value().gemm;
      CAPTURE(op, m, n);
      CHECK((plan.is_swapped && plan.num_ctas() <= NUM_SMS));
      CHECK(plan.num_workers < num_cluster_tiles(call, plan));
      CHECK((plan.num_streamk_tiles > 0) == (op == MK_OPERATOR_ALLGATHER_GEMM));
    }
  }
}
