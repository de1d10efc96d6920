// SPDX-License-Identifier: MIT
// The GEMM operators through the C interface, exact to the last bit on integers and within tolerance on random
// numbers.
#include <cstdlib>
#include <deque>

#include "gemm_cases.h"
#include "gemm_launch.h"
#include "support/catch.h"
#include "support/sanitizers.h"

using namespace mk::test;

namespace {

std::string layout_text(const std::vector<int32_t>& layout) {
  std::string text;
  for (const int32_t node : layout) text += std::to_string(node) + " ";
  return text;
}

void require_none(const std::vector<std::string>& failures) {
  INFO(join_lines(failures));
  REQUIRE(failures.empty());
}

}  // namespace

TEST_CASE("Corner cases are exact on every node layout") {
  for (const auto& layout : fewer_if_slow(node_layouts())) {
    RankJob job;
    job.node_of_rank = layout;
    std::vector<GemmCase> cases;
    for (const mk_operator_t op : kGemmOperators) {
      const auto more = corner_cases(op, job.nranks());
      cases.insert(cases.end(), more.begin(), more.end());
    }
    const auto problems = make_problems(cases, job.nranks());
    INFO("nodes " << layout_text(layout));
    require_none(run_rank_threads(job, [&](RankSession& session) {
      run_problems(session, problems, [](size_t number) { return number % 2 == 0; });
    }));
  }
}

TEST_CASE("Mixed shapes and features are exact on every node layout") {
  uint64_t seed = 100;
  for (const auto& layout : fewer_if_slow(node_layouts())) {
    RankJob job;
    job.node_of_rank = layout;
    const size_t count = job.nranks() > 8 ? 20 : 40;
    const auto problems = make_problems(mixed_cases(++seed, count, job.nranks()), job.nranks());
    INFO("nodes " << layout_text(layout));
    require_none(run_rank_threads(job, [&](RankSession& session) {
      run_problems(session, problems, [](size_t number) { return number % 3 == 0; });
    }));
  }
}

TEST_CASE("Launches enqueued without waiting are exact") {
  for (const auto& layout : {std::vector<int32_t>{0, 0, 0}, {0, 1, 0, 1}, {0, 0, 0, 1, 1}}) {
    RankJob job;
    job.node_of_rank = layout;
    const auto problems = make_problems(mixed_cases(7, 48, job.nranks()), job.nranks());
    require_none(run_rank_threads(job, [&](RankSession& session) {
      RankMemory memory;
      if (!memory.allocate(session, kSlotBytes)) return;
      for (const GemmProblem& problem : problems) {
        if (!session.ok(GemmLaunch::try_prepare(session.comm(), problem.gemm, session.nranks()), "prepare"))
          return;
      }
      for (size_t first = 0; first < problems.size(); first += RankMemory::kSlots) {
        std::deque<GemmLaunch> launches;
        for (int slot = 0; slot < RankMemory::kSlots; ++slot) {
          launches.emplace_back(session, problems[first + static_cast<size_t>(slot)], &memory, slot);
        }
        for (GemmLaunch& launch : launches) {
          if (!launch.enqueue()) return;
        }
        if (!session.ok(mk_comm_synchronize(session.comm(), nullptr), "mk_comm_synchronize")) return;
        for (GemmLaunch& launch : launches) launch.verify();
      }
      memory.release(session);
    }));
  }
}

TEST_CASE("Random numbers are within tolerance") {
  for (const auto& layout : {std::vector<int32_t>{0, 0}, {0, 0, 0, 1, 1}}) {
    RankJob job;
    job.node_of_rank = layout;
    std::vector<GemmCase> cases;
    for (const mk_operator_t op : kGemmOperators) {
      for (const mk_dtype_t dtype : {MK_DTYPE_BF16, MK_DTYPE_FP16}) {
        for (const mk_dtype_t out_dtype : {MK_DTYPE_BF16, MK_DTYPE_FP16, MK_DTYPE_FP32}) {
          GemmCase gemm;
          gemm.op = op;
          gemm.m = 61;
          gemm.n = 47;
          gemm.k = 90;
          gemm.dtype = dtype;
          gemm.out_dtype = out_dtype;
          gemm.comm_dtype =
              op != MK_OPERATOR_ALLGATHER_GEMM && out_dtype == MK_DTYPE_FP32 ? MK_DTYPE_FP32 : MK_DTYPE_DEFAULT;
          gemm.bias = true;
          gemm.bias_dtype = MK_DTYPE_FP32;
          gemm.accumulate = out_dtype == MK_DTYPE_FP32;
          gemm.integers = false;
          gemm.seed = cases.size();
          cases.push_back(gemm);
        }
      }
    }
    for (const mk_dtype_t dtype : {MK_DTYPE_BF16, MK_DTYPE_FP16}) {
      GemmCase gemm;
      gemm.wgrad = true;
      gemm.m = 90, gemm.n = 47, gemm.k = 61;
      gemm.dtype = dtype;
      gemm.out_dtype = MK_DTYPE_FP32;
      gemm.accumulate = true;
      gemm.integers = false;
      gemm.seed = cases.size();
      cases.push_back(gemm);
    }
    const auto problems = make_problems(cases, job.nranks());
    require_none(run_rank_threads(
        job, [&](RankSession& session) { run_problems(session, problems, [](size_t) { return false; }); }));
  }
}

TEST_CASE("Workspace grows and earlier maxima stay good") {
  RankJob job;
  job.node_of_rank = {0, 0, 1};
  job.require_prepare = true;
  for (int product = 0; product < 4; ++product) {
    GemmCase small;
    small.op = kGemmOperators[product % 3];
    small.wgrad = product == 3;
    small.m = 9;
    small.n = small.k = 16;
    GemmCase large = small;
    large.m = 200;
    large.n = large.k = 100;
    GemmCase other = small;  // as wide as the large one, but not as tall as was prepared
    other.m = 201;
    const GemmProblem small_problem(small, 3), large_problem(large, 3), other_problem(other, 3);
    require_none(run_rank_threads(job, [&](RankSession& session) {
      const auto refused = [&](const GemmProblem& problem) {
        GemmLaunch launch(session, problem);
        if (launch.try_enqueue() != MK_ERROR_NOT_PREPARED) session.fail("ran without prepare");
      };
      refused(small_problem);
      if (!run_launch(session, small_problem, nullptr, true)) return;
      refused(large_problem);
      if (!run_launch(session, small_problem, nullptr, false)) return;
      if (!run_launch(session, large_problem, nullptr, true)) return;
      refused(other_problem);
      if (!run_launch(session, small_problem, nullptr, false)) return;
      if (!run_launch(session, large_problem, nullptr, false)) return;
      run_launch(session, small_problem, nullptr, true);
    }));
  }
}

TEST_CASE("Puts and signals in the worst order are exact") {
  for (const char* seed : {"1", "2", "3"}) {
    setenv("MK_LOOPBACK_SEED", seed, 1);
    for (const auto& layout : {std::vector<int32_t>{0, 1}, {0, 1, 0, 1, 0}, {0, 0, 1, 1, 2, 2}}) {
      RankJob job;
      job.node_of_rank = layout;
      const auto problems = make_problems(mixed_cases(std::stoul(seed), 20, job.nranks()), job.nranks());
      require_none(run_rank_threads(job, [&](RankSession& session) {
        run_problems(session, problems, [](size_t number) { return number % 2 == 0; });
      }));
    }
  }
  unsetenv("MK_LOOPBACK_SEED");
}
