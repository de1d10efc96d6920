// SPDX-License-Identifier: MIT
// The bits of ring attention and of its gradients depend on topology, shape, plan and inputs, and on nothing
// else.
#include "attention_launch.h"
#include "support/catch.h"

using namespace mk::test;

namespace {

AttentionCase random_numbers(mk_causal_t causal, int nranks) {
  AttentionCase attention;
  attention.seq = 7 * nranks + 2;
  attention.heads = 2;
  attention.kv_heads = 1;
  attention.dim = 16;
  attention.causal = causal;
  attention.tuning.tile_m = 4;
  attention.tuning.tile_n = 3;
  attention.tuning.chunk_bytes = 200;
  return attention;
}

// Runs every problem `rounds` times, all in flight together; their results must have the same bits.
void check(const RankJob& job, const std::deque<AttentionProblem>& problems, int rounds) {
  const auto failures = run_rank_threads(job, [&](RankSession& session) {
    std::deque<AttentionLaunch> launches;
    for (const AttentionProblem& problem : problems) launches.emplace_back(session, problem);
    std::string forward, backward;
    for (int round = 0; round < rounds; ++round) {
      for (AttentionLaunch& launch : launches) {
        launch.poison_outputs();
        if (!launch.forward() || !launch.backward()) return;
      }
      if (!session.ok(mk_comm_synchronize(session.comm(), nullptr), "mk_comm_synchronize")) return;
      for (AttentionLaunch& launch : launches) {
        if (forward.empty()) {
          launch.verify_forward();
          launch.verify_backward();
          forward = launch.forward_bits();
          backward = launch.backward_bits();
        }
        if (launch.forward_bits() != forward) session.fail("round " + std::to_string(round) + ": o or lse");
        if (launch.backward_bits() != backward) session.fail("round " + std::to_string(round) + ": gradients");
      }
    }
  });
  INFO(describe(problems[0].attention) << "\n" << join_lines(failures));
  REQUIRE(failures.empty());
}

}  // namespace

TEST_CASE("200 runs of ring attention give the same bits") {
  for (const auto& layout : {std::vector<int32_t>{0, 0, 0}, {0, 1, 0, 1, 0}}) {
    RankJob job;
    job.node_of_rank = layout;
    job.host_threads = 2;
    const std::vector<AttentionCase> four(4, random_numbers(MK_CAUSAL_ZIGZAG, job.nranks()));
    check(job, make_problems(four), 50);
  }
}

TEST_CASE("The number of threads does not change the bits of ring attention") {
  for (const auto& layout : {std::vector<int32_t>{0, 0, 0}, {0, 0, 1, 1}, {0, 1, 0, 1, 0, 2}}) {
    RankJob job;
    job.node_of_rank = layout;
    for (const mk_causal_t causal : {MK_CAUSAL_NONE, MK_CAUSAL_CONTIGUOUS, MK_CAUSAL_ZIGZAG}) {
      std::deque<AttentionProblem> variants;
      for (const int threads : {1, 2, 3, 5}) {
        AttentionCase attention = random_numbers(causal, job.nranks());
        attention.tuning.compute_ctas = threads;
        variants.emplace_back(attention);
      }
      check(job, variants, 2);
    }
  }
}
