// SPDX-License-Identifier: MIT
// The GEMM operators between processes. A program of its own: forked ranks must not inherit a library in use.
#include "gemm_cases.h"
#include "gemm_launch.h"
#include "support/catch.h"

using namespace mk::test;

TEST_CASE("Ranks that are processes are exact") {
  for (const auto& layout : {std::vector<int32_t>{0, 0, 0}, {0, 1, 0, 1}, {0, 0, 0, 1, 1}}) {
    RankJob job;
    job.node_of_rank = layout;
    const auto problems = make_problems(mixed_cases(11, 30, job.nranks()), job.nranks());
    const auto failures = run_rank_processes(job, 120, [&](RankSession& session) {
      run_problems(session, problems, [](size_t number) { return number % 2 == 0; });
    });
    INFO(join_lines(failures));
    REQUIRE(failures.empty());
  }
}

TEST_CASE("A wrong element in one process is reported") {
  RankJob job;
  job.node_of_rank = {0, 0, 0};
  GemmCase gemm;
  gemm.m = 9;
  gemm.n = gemm.k = 8;
  const GemmProblem right(gemm, 3);
  GemmProblem wrong = right;
  wrong.c[2](4, 5) += 1;
  const auto failures = run_rank_processes(job, 120, [&](RankSession& session) {
    run_launch(session, session.rank() == 2 ? wrong : right, nullptr, false);
  });
  REQUIRE(failures.size() == 1);
  REQUIRE(failures[0].find("rank 2") == 0);
}
