// SPDX-License-Identifier: MIT
// The protocol of the mixture-of-experts operators as their schedules state it, for many routings and layouts,
// without running it.
#include "kernels/ops/moe_dispatch_gemm/plan.h"
#include "kernels/ops/moe_gemm_combine/plan.h"
#include "moe_model.h"
#include "support/catch.h"
#include "transport/command.h"

using namespace mk;
using namespace mk::test;

namespace {

const mk_operator_t kOperators[] = {MK_OPERATOR_MOE_DISPATCH_GEMM, MK_OPERATOR_MOE_GEMM_COMBINE};

const std::vector<std::vector<int32_t>>& layouts() {
  static const std::vector<std::vector<int32_t>> all = {
      {0},
      {0, 0},
      {0, 1},
      {0, 0, 0, 1},
      {0, 1, 0, 1},
      {0, 1, 2, 0},
      {0, 1, 0, 1, 0},
      {0, 0, 0, 1, 1, 2},
      {7, 3, 7, 3, 3, 9},
      {0, 0, 0, 0, 1, 1, 1, 1},
  };
  return all;
}

std::vector<MoeCase> cases(int nranks) {
  std::vector<MoeCase> all;
  for (const Spread spread : {Spread::even, Spread::one_expert, Spread::few, Spread::half, Spread::nowhere}) {
    for (const int64_t chunk_bytes : {1, 300, 0}) {
      MoeCase& moe = all.emplace_back();
      moe.spread = spread;
      moe.tokens = spread == Spread::few ? 80 : 6;  // more tokens than chunks
      moe.hidden = 8;
      moe.experts = 2 * nranks - 1;
      moe.topk = 3;
      moe.out_dtype = chunk_bytes == 300 ? MK_DTYPE_FP32 : MK_DTYPE_BF16;
      moe.tuning.chunk_bytes = chunk_bytes;
      moe.tuning.tile_m = 4;
      moe.seed = all.size();
    }
  }
  return all;
}

std::string lines(const std::vector<std::string>& all) {
  std::string text;
  for (size_t at = 0; at < all.size() && at < 20; ++at) text += all[at] + "\n";
  return text;
}

}  // namespace

TEST_CASE("Expert layers: no role waits in a circle, and every flag, signal and token is accounted for") {
  for (const auto& layout : layouts()) {
    const Views views(layout);
    for (const MoeCase& moe : cases(views.nranks())) {
      const MoeProblem problem(moe, views.nranks());
      for (const mk_operator_t op : kOperators) {
        const MoeModel model(views, problem, op, 2);
        const std::string complaints = lines(model.complaints());
        const std::string cycle = lines(model.graph().cycle());
        INFO(op << " " << describe(moe) << "\n" << complaints << cycle);
        REQUIRE(complaints.empty());
        REQUIRE(cycle.empty());
      }
    }
  }
}

TEST_CASE("Expert layers: a bank is written again only when its reader has left the launch before last") {
  MoeCase moe;
  moe.spread = Spread::nowhere;
  for (const auto& layout : layouts()) {
    const Views views(layout);
    const MoeProblem problem(moe, views.nranks());
    for (const mk_operator_t op : kOperators) {
      const MoeModel model(views, problem, op, 3);
      for (int writer = 0; writer < views.nranks(); ++writer) {
        const int reader = (writer + 1) % views.nranks();
        REQUIRE(model.graph().waits({"begin", writer, 2}, {"end", reader, 0}));
      }
    }
  }
}

TEST_CASE("Expert layers: without waiting for counts and entries a rank without rows runs ahead") {
  MoeCase moe;
  moe.spread = Spread::nowhere;
  const Views views({0, 0});
  const MoeProblem problem(moe, 2);
  for (const mk_operator_t op : kOperators) {
    const MoeModel model(views, problem, op, 3, MoeFault::no_entry_wait);
    REQUIRE_FALSE(model.graph().waits({"begin", 0, 2}, {"end", 1, 0}));
  }
}

TEST_CASE("Expert layers: planted circles are found") {
  MoeCase moe;
  moe.same_tokens = true;
  for (const auto& layout : {std::vector<int32_t>{0, 1}, {0, 0, 1, 1}, {0, 1, 0, 1, 0}}) {
    const Views views(layout);
    const MoeProblem problem(moe, views.nranks());
    REQUIRE_FALSE(MoeModel(views, problem, MK_OPERATOR_MOE_DISPATCH_GEMM, 1, MoeFault::forward_last)
                      .graph()
                      .cycle()
                      .empty());
    REQUIRE_FALSE(MoeModel(views, problem, MK_OPERATOR_MOE_GEMM_COMBINE, 1, MoeFault::product_last)
                      .graph()
                      .cycle()
                      .empty());
  }
}

TEST_CASE("Expert layers: flags and signals of large worlds are in their bank") {
  for (const auto& [nranks, local] : {std::pair{256, 8}, {1024, 8}, {1500, 72}}) {
    std::vector<int32_t> layout;
    for (int rank = 0; rank < nranks; ++rank) layout.push_back(rank / local);
    const Views views(layout);
    MoeCall call;
    call.hidden = 7168;
    call.inter = 2048;
    call.experts = 256;
    call.topk = 8;
    for (const mk_operator_t op : kOperators) {
      call.op = op;
      const bool dispatches = op == MK_OPERATOR_MOE_DISPATCH_GEMM;
      const auto plan = dispatches ? moe_dispatch_gemm::plan_host(call, views.of(0), 1)
                                   : moe_gemm_combine::plan_host(call, views.of(0), 1);
      REQUIRE(plan.ok());
      REQUIRE(plan.value().num_chunks >= 1);
      const int last = plan.value().num_chunks - 1;
      const TopologyView view = views.of(nranks - 1);
      const auto dispatch = moe_dispatch_gemm::make_schedule(call, plan.value(), view);
      const auto combine = moe_gemm_combine::make_schedule(call, plan.value(), view);
      const int last_node = view.num_nodes - 1;
      const int flag =
          dispatches ? dispatch.flag(nranks - 1, last) : combine.flag(nranks - 1, nranks - 1, last);
      const int signal =
          dispatches ? dispatch.signal(nranks - 1, 0, last) : combine.sum_signal(last_node, last);
      REQUIRE(flag < kFlagsPerBank);
      REQUIRE(signal < static_cast<int>(kSignalsPerBank));
    }
  }
}
