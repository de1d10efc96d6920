// SPDX-License-Identifier: MIT
// Expert layers between processes. A program of its own: forked ranks must not inherit a library in use.
#include "moe_launch.h"
#include "support/catch.h"

using namespace mk::test;

TEST_CASE("Expert layers of ranks that are processes are exact") {
  for (const auto& layout : {std::vector<int32_t>{0, 0, 0}, {0, 1, 0, 1}, {0, 0, 0, 1, 1}}) {
    RankJob job;
    job.node_of_rank = layout;
    std::vector<MoeCase> cases;
    for (const Spread spread : {Spread::even, Spread::one_expert, Spread::few, Spread::half, Spread::nowhere}) {
      MoeCase& moe = cases.emplace_back();
      moe.spread = spread;
      moe.tokens = 20;
      moe.experts = 7;
      moe.topk = 3;
      moe.dispatched_rows = true;
      moe.row_scale = true;
      moe.tuning.chunk_bytes = 500;
      moe.seed = cases.size();
    }
    const auto problems = make_problems(cases, job.nranks());
    const auto failures = run_rank_processes(job, 120, [&](RankSession& session) {
      for (const MoeProblem& problem : problems) {
        if (!run_layer(session, problem, problem.moe.seed % 2 == 0)) return;
      }
    });
    INFO(join_lines(failures));
    REQUIRE(failures.empty());
  }
}
