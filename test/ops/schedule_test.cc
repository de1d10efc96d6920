// SPDX-License-Identifier: MIT
// The protocol of the GEMM operators as their schedules state it, for many shapes and layouts, without running
// it.
#include "gemm_cases.h"
#include "kernels/ops/allgather_gemm/plan.h"
#include "kernels/ops/gemm_allreduce/plan.h"
#include "kernels/ops/gemm_reduce_scatter/plan.h"
#include "kernels/plan.h"
#include "schedule_model.h"
#include "support/catch.h"

using namespace mk;
using namespace mk::test;

namespace {

std::vector<std::vector<int32_t>> layouts() {
  auto all = node_layouts();
  std::vector<int32_t> wide(32), uneven(24);
  for (int rank = 0; rank < 32; ++rank) wide[static_cast<size_t>(rank)] = rank / 8;
  for (int rank = 0; rank < 24; ++rank) uneven[static_cast<size_t>(rank)] = rank * rank % 7;
  all.push_back(wide);
  all.push_back(uneven);
  return all;
}

GemmCall make_call(mk_operator_t op, int64_t m, int64_t n, int64_t k, int tile_m, int64_t chunk_bytes) {
  GemmCall call;
  call.op = op;
  call.m = m;
  call.n = n;
  call.k = k;
  call.tuning.tile_m = tile_m;
  call.tuning.chunk_bytes = chunk_bytes;
  return call;
}

std::vector<GemmCall> calls(mk_operator_t op, int nranks) {
  std::vector<GemmCall> all;
  for (const int64_t m :
       {int64_t{0}, int64_t{1}, int64_t{nranks - 1}, int64_t{nranks + 1}, int64_t{nranks} * 7 + 3}) {
    all.push_back(make_call(op, m, 33, 40, 0, 0));
    all.push_back(make_call(op, m, 1, 1, 1, 1));
  }
  all.push_back(make_call(op, nranks * 5, 0, 0, 0, 0));
  all.push_back(make_call(op, nranks * 9 - 1, 24, 8, 2, 200));
  all.push_back(make_call(op, nranks * 9 - 1, 24, 8, 3, 7 * 16));
  all.back().out_dtype = all.back().comm_dtype = MK_DTYPE_FP32;
  if (nranks <= 8) all.push_back(make_call(op, nranks * 70, 5, 3, 1, 1));  // more rows than chunks
  if (op != MK_OPERATOR_ALLGATHER_GEMM) return all;
  for (size_t at = 0, forward = all.size(); at < forward; ++at) {
    all.push_back(all[at]);
    all.back().mode = MK_ALLGATHER_WGRAD;
  }
  return all;
}

std::string text_of(const GemmCall& call, const std::vector<int32_t>& layout) {
  std::string text = format("%s mode %d m=%lld n=%lld k=%lld chunk_bytes=%lld, nodes", operator_name(call.op),
                            call.mode, static_cast<long long>(call.m), static_cast<long long>(call.n),
                            static_cast<long long>(call.k), static_cast<long long>(call.tuning.chunk_bytes));
  for (const int32_t node : layout) text += " " + std::to_string(node);
  return text;
}

std::string lines(const std::vector<std::string>& all) {
  std::string text;
  for (size_t at = 0; at < all.size() && at < 20; ++at) text += all[at] + "\n";
  return text;
}

}  // namespace

TEST_CASE("No role waits in a circle, and every flag, signal and byte is accounted for") {
  for (const auto& layout : layouts()) {
    const Views views(layout);
    for (const mk_operator_t op : kGemmOperators) {
      for (const GemmCall& call : calls(op, views.nranks())) {
        const ScheduleModel model(views, call, 2, true);
        const std::string complaints = lines(model.complaints());
        const std::string cycle = lines(model.graph().cycle());
        INFO(text_of(call, layout) << "\n" << complaints << cycle);
        REQUIRE(complaints.empty());
        REQUIRE(cycle.empty());
      }
    }
  }
}

TEST_CASE("A bank is written again only when its reader has left the launch before last") {
  for (const auto& layout : node_layouts()) {
    const Views views(layout);
    for (const mk_operator_t op : kGemmOperators) {
      for (const int64_t m : {int64_t{1}, int64_t{views.nranks()} * 2}) {
        const ScheduleModel model(views, make_call(op, m, 3, 3, 0, 0), 3, false);
        for (int writer = 0; writer < views.nranks(); ++writer) {
          for (int reader = 0; reader < views.nranks(); ++reader) {
            INFO(operator_name(op) << " m=" << m << ": rank " << writer << " before rank " << reader);
            REQUIRE(model.graph().waits(ScheduleModel::begin(writer, 2), ScheduleModel::end(reader, 0)));
          }
        }
      }
    }
  }
}

TEST_CASE("Without the entry wait a rank that owns nothing runs ahead") {
  const Views views({0, 0});
  const ScheduleModel model(views, make_call(MK_OPERATOR_ALLGATHER_GEMM, 1, 3, 3, 0, 0), 3, false,
                            Fault::no_entry_wait);
  REQUIRE_FALSE(model.graph().waits(ScheduleModel::begin(0, 2), ScheduleModel::end(1, 0)));
}

TEST_CASE("Planted circles are found") {
  const auto cycle = [](const std::vector<int32_t>& layout, mk_operator_t op, Fault fault) {
    const Views views(layout);
    return ScheduleModel(views, make_call(op, 40, 8, 8, 0, 0), 1, true, fault).graph().cycle();
  };
  for (const auto& layout : {std::vector<int32_t>{0, 1}, {0, 0, 1, 1}, {0, 1, 0, 1, 0}}) {
    REQUIRE_FALSE(cycle(layout, MK_OPERATOR_GEMM_REDUCE_SCATTER, Fault::sum_before_send).empty());
    REQUIRE_FALSE(cycle(layout, MK_OPERATOR_GEMM_ALLREDUCE, Fault::sum_before_send).empty());
    REQUIRE_FALSE(cycle(layout, MK_OPERATOR_ALLGATHER_GEMM, Fault::gather_before_push).empty());
    REQUIRE_FALSE(cycle(layout, MK_OPERATOR_ALLGATHER_GEMM, Fault::receive_waits_to_send).empty());
  }
}

TEST_CASE("Large chunks of few rows are not refused") {
  const Views views({0, 1});
  GemmCall call = make_call(MK_OPERATOR_ALLGATHER_GEMM, 3, 1, 1, 0, int64_t{1} << 30);
  REQUIRE(allgather_gemm::plan_host(call, views.of(0), 1).value().num_chunks == 1);
  call.k = int64_t{1} << 28;
  REQUIRE(allgather_gemm::plan_host(call, views.of(0), 1).ok());
}

TEST_CASE("Rows that no chunks can carry are refused with a sentence") {
  const Views views({0, 1});
  const TopologyView view = views.of(0);
  for (const auto& [m, columns] : {std::pair{int64_t{1} << 44, int64_t{0}},
                                   {int64_t{1} << 38, int64_t{64}},
                                   {int64_t{2}, int64_t{1} << 40}}) {
    const GemmCall gather = make_call(MK_OPERATOR_ALLGATHER_GEMM, m, 0, columns, 0, 0);
    const GemmCall scatter = make_call(MK_OPERATOR_GEMM_REDUCE_SCATTER, m, columns, 0, 0, 0);
    const GemmCall reduce = make_call(MK_OPERATOR_GEMM_ALLREDUCE, m, columns, 0, 0, 0);
    for (const auto& plan :
         {allgather_gemm::plan_host(gather, view, 1), gemm_reduce_scatter::plan_host(scatter, view, 1),
          gemm_allreduce::plan_host(reduce, view, 1)}) {
      REQUIRE(plan.status().code() == MK_ERROR_UNSUPPORTED);
      REQUIRE(plan.status().sentence().find("transfer") != std::string::npos);
    }
  }
}

TEST_CASE("Chunks stay within flags, signals and the limit, however many rows there are") {
  for (const auto& layout : layouts()) {
    const Views views(layout);
    for (const mk_operator_t op : kGemmOperators) {
      for (const int64_t m : {int64_t{1} << 14, int64_t{1} << 20, int64_t{1} << 30}) {
        const GemmCall call = make_call(op, m, 16, 16, 0, 1);
        const mk_plan_t plan = op == MK_OPERATOR_ALLGATHER_GEMM
                                   ? allgather_gemm::plan_host(call, views.of(0), 1).value()
                               : op == MK_OPERATOR_GEMM_REDUCE_SCATTER
                                   ? gemm_reduce_scatter::plan_host(call, views.of(0), 1).value()
                                   : gemm_allreduce::plan_host(call, views.of(0), 1).value();
        REQUIRE(plan.num_chunks >= 1);
        REQUIRE(plan.num_chunks <= kMaxChunks);
        REQUIRE(plan.chunk_rows % plan.tile_m == 0);
        REQUIRE(int64_t{plan.num_chunks} * plan.chunk_rows >= ceil_div(m, views.nranks()));
        REQUIRE(plan.chunk_bytes <= int64_t{UINT32_MAX});
      }
    }
  }
}
