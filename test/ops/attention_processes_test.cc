// SPDX-License-Identifier: MIT
// Ring attention between processes. A program of its own: forked ranks must not inherit a library in use.
#include "attention_launch.h"
#include "support/catch.h"

using namespace mk::test;

TEST_CASE("Ring attention of ranks that are processes") {
  for (const auto& layout : {std::vector<int32_t>{0, 0, 0}, {0, 1, 0, 1}, {0, 0, 0, 1, 1}}) {
    RankJob job;
    job.node_of_rank = layout;
    std::vector<AttentionCase> cases;
    for (uint64_t index = 0; index < 20; ++index)
      cases.push_back(mixed_attention_case(11, index, job.nranks()));
    const auto problems = make_problems(cases);
    const auto failures = run_rank_processes(job, 100, [&](RankSession& session) {
      for (size_t number = 0; number < problems.size(); ++number) {
        if (!run_attention(session, problems[number], Direction::both, number % 2 == 0, number % 3 == 0))
          return;
      }
    });
    INFO(join_lines(failures));
    REQUIRE(failures.empty());
  }
}
