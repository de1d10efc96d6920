// SPDX-License-Identifier: MIT
// Ring attention and its gradients, ranks as threads, against float64 loops over the whole sequence.
#include "attention_launch.h"
#include "support/catch.h"
#include "support/sanitizers.h"

using namespace mk::test;

namespace {

// fp16 infinities among the keys have no gradient: zero times infinity.
Direction directions(const AttentionCase& attention) {
  return attention.numbers == Numbers::masked && attention.dtype == MK_DTYPE_FP16 ? Direction::forward
                                                                                  : Direction::both;
}

void check(const std::vector<int32_t>& layout, const std::vector<AttentionCase>& cases, int host_threads) {
  RankJob job;
  job.node_of_rank = layout;
  job.host_threads = host_threads;
  const std::deque<AttentionProblem> problems = make_problems(cases);
  const auto failures = run_rank_threads(job, [&](RankSession& session) {
    for (size_t number = 0; number < problems.size(); ++number) {
      const AttentionProblem& problem = problems[number];
      if (!run_attention(session, problem, directions(problem.attention), number % 2 == 0, number % 5 == 0))
        return;
    }
  });
  INFO(layout.size() << " ranks\n" << join_lines(failures));
  REQUIRE(failures.empty());
}

}  // namespace

TEST_CASE("Corners on every layout") {
  for (const auto& layout : fewer_if_slow(attention_layouts())) {
    check(layout, attention_corner_cases(static_cast<int>(layout.size())),
          1 + static_cast<int>(layout.size()) % 2);
  }
}

TEST_CASE("Mixed calls on every layout") {
  uint64_t seed = 100;
  for (const auto& layout : fewer_if_slow(attention_layouts())) {
    std::vector<AttentionCase> cases;
    for (uint64_t index = 0; index < 6; ++index)
      cases.push_back(mixed_attention_case(seed, index, static_cast<int>(layout.size())));
    check(layout, cases, 2);
    ++seed;
  }
}

TEST_CASE("Gradients of the function itself, where queries see many keys") {
  std::vector<AttentionCase> cases;
  for (const mk_dtype_t dtype : {MK_DTYPE_BF16, MK_DTYPE_FP16}) {
    for (const mk_causal_t causal : {MK_CAUSAL_NONE, MK_CAUSAL_ZIGZAG}) {
      AttentionCase& attention = cases.emplace_back();
      attention.seq = 150;
      attention.dim = 32;
      attention.dtype = dtype;
      attention.causal = causal;
      attention.rounded_o = false;
    }
  }
  check({0, 0, 1}, cases, 2);
}

TEST_CASE("A call within prepared maxima needs no prepare of its own") {
  RankJob job;
  job.node_of_rank = {0, 1, 0};
  job.require_prepare = true;
  AttentionCase largest;
  largest.seq = 90;
  largest.batch = 2;
  largest.heads = 4;
  largest.kv_heads = 2;
  largest.dim = 64;
  std::vector<AttentionCase> cases;
  for (uint64_t index = 0; index < 12; ++index) {
    AttentionCase attention = mixed_attention_case(7, index, 3);
    attention.batch = 1;
    attention.heads = attention.kv_heads = 2;
    attention.dim = std::min(attention.dim, 64);
    cases.push_back(attention);
  }
  const std::deque<AttentionProblem> problems = make_problems(cases);
  const auto failures = run_rank_threads(job, [&](RankSession& session) {
    AttentionLaunch early(session, problems[0]);
    if (early.try_forward() != MK_ERROR_NOT_PREPARED) session.fail("expected MK_ERROR_NOT_PREPARED");
    for (const bool backward : {false, true}) {
      mk_ring_attention_maxima_t maxima = MK_RING_ATTENTION_MAXIMA_INIT;
      maxima.batch = largest.batch, maxima.seq = largest.seq, maxima.dim = largest.dim;
      maxima.heads = largest.heads, maxima.kv_heads = largest.kv_heads, maxima.num_sequences = 8;
      const auto prepare = backward ? mk_ring_attention_backward_prepare : mk_ring_attention_prepare;
      const auto needed =
          backward ? mk_ring_attention_backward_workspace_bytes : mk_ring_attention_workspace_bytes;
      size_t bytes = 0;
      if (!session.ok(needed(session.comm(), &maxima, &bytes), "workspace_bytes")) return;
      if (bytes == 0) session.fail("workspace_bytes: 0");
      if (!session.ok(prepare(session.comm(), &maxima), "prepare")) return;
    }
    for (const AttentionProblem& problem : problems) {
      if (!run_attention(session, problem, Direction::both, false, true)) return;
    }
  });
  INFO(join_lines(failures));
  REQUIRE(failures.empty());
}

TEST_CASE("Bad cu_seqlens end the launch on every rank, and the communicator goes on") {
  AttentionCase attention;
  attention.seq = 20;
  attention.dim = 8;
  attention.cu_seqlens = {0, 7, 20};
  const AttentionProblem problem(attention);
  const std::vector<std::pair<std::vector<int32_t>, std::string>> bad = {
      {{1, 7, 20}, "cu_seqlens[0]: expected 0, saw 1"},
      {{0, 27, 20}, "cu_seqlens[2]: expected at least 27 (the one before it), saw 20"},
      {{0, -1, 20}, "cu_seqlens[1]: expected at least 0 (the one before it), saw -1"},
      {{0, 7, 19}, "cu_seqlens[2]: expected 20 (seq), saw 19"},
  };
  for (const auto& layout : {std::vector<int32_t>{0}, {0, 0, 1}}) {
    for (const mk_causal_t causal : {MK_CAUSAL_NONE, MK_CAUSAL_ZIGZAG}) {
      RankJob job;
      job.node_of_rank = layout;
      AttentionProblem spoilt = problem;
      spoilt.attention.causal = causal;
      const auto failures = run_rank_threads(job, [&](RankSession& session) {
        for (const auto& [bounds, sentence] : bad) {
          for (const bool backward : {false, true}) {
            AttentionLaunch launch(session, spoilt);
            launch.cu_seqlens = bounds;
            if (!(backward ? launch.backward() : launch.forward())) return;
            const mk_status_t status = mk_comm_synchronize(session.comm(), nullptr);
            const std::string said = mk_get_last_error(session.comm());
            if (status != MK_ERROR_DATA || said.find(sentence) == std::string::npos)
              session.fail("expected MK_ERROR_DATA, " + sentence + ", saw " + mk_status_string(status) + ", " +
                           said);
            if (!launch.outputs_untouched()) session.fail("an output was written");
            if (!session.ok(mk_comm_clear_async_error(session.comm()), "mk_comm_clear_async_error")) return;
          }
        }
        run_attention(session, problem, Direction::both, false, false);
      });
      INFO(join_lines(failures));
      REQUIRE(failures.empty());
    }
  }
}

TEST_CASE("No lse if it is not asked for, and no pointers where there are no positions") {
  AttentionCase attention;
  attention.seq = 2;  // the last of three ranks has none
  attention.dim = 8;
  const AttentionProblem problem(attention);
  RankJob job;
  job.node_of_rank = {0, 1, 0};
  const auto failures = run_rank_threads(job, [&](RankSession& session) {
    AttentionLaunch launch(session, problem);
    launch.change = [&](mk_ring_attention_args_t& args) {
      args.lse = nullptr;
      if (session.rank() != 2) return;
      args.q = args.k = args.v = nullptr;
      args.o = nullptr;
    };
    if (!launch.forward() || !session.ok(mk_comm_synchronize(session.comm(), nullptr), "synchronize")) return;
    launch.verify_forward();
    if (!launch.lse_untouched()) session.fail("lse was written");
  });
  INFO(join_lines(failures));
  REQUIRE(failures.empty());
}

TEST_CASE("A wrong element is reported") {
  AttentionCase attention;
  attention.seq = 9;
  attention.dim = 8;
  attention.numbers = Numbers::one_hot;
  attention.softmax_scale = 1;
  const AttentionProblem right(attention);
  for (const Direction direction : {Direction::forward, Direction::backward}) {
    AttentionProblem wrong = right;
    (direction == Direction::forward ? wrong.o : wrong.dv).row(0, 8, 0)[3] += 1;
    RankJob job;
    job.node_of_rank = {0, 0, 0};
    const auto failures = run_rank_threads(job, [&](RankSession& session) {
      run_attention(session, session.rank() == 2 ? wrong : right, direction, false, false);
    });
    REQUIRE_FALSE(failures.empty());
    REQUIRE(failures[0].find("rank 2") == 0);
  }
}
