// SPDX-License-Identifier: MIT
// Ranks that call ring attention differently: every rank gets MK_ERROR_MISMATCH naming two of them and what
// they called, and the communicator goes on.
#include "attention_launch.h"
#include "support/catch.h"

using namespace mk::test;

// Ranks that lay the receive areas out differently read and write the same places until they find out. That
// race is theirs; what the launches after it compute is compared below.
extern "C" __attribute__((visibility("default"))) const char* __tsan_default_suppressions();
extern "C" const char* __tsan_default_suppressions() {
  return "race:kernels/ops/\nrace:region_table.cc\nrace:loopback.cc\n";
}

namespace {

struct Odd {
  const char* says;
  std::function<void(AttentionCase&)> change;
};

const Odd kOdd[] = {
    {"scale=0.5", [](AttentionCase& odd) { odd.softmax_scale = 0.5f; }},
    {"causal", [](AttentionCase& odd) { odd.causal = MK_CAUSAL_CONTIGUOUS; }},
    {"causal zigzag", [](AttentionCase& odd) { odd.causal = MK_CAUSAL_ZIGZAG; }},
    {"bhsd", [](AttentionCase& odd) { odd.layout = MK_ATTENTION_BHSD; }},
    {"fp16", [](AttentionCase& odd) { odd.dtype = MK_DTYPE_FP16; }},
    {"seq=23", [](AttentionCase& odd) { odd.seq = 23; }},
    {"heads=1", [](AttentionCase& odd) { odd.heads = odd.kv_heads = 1; }},
    {"dim=8", [](AttentionCase& odd) { odd.dim = 8; }},
    {"batch=2", [](AttentionCase& odd) { odd.batch = 2; }},
    {"num_sequences=2",
     [](AttentionCase& odd) {
       odd.cu_seqlens = {0, 9, 24};
     }},
    {"tuning", [](AttentionCase& odd) { odd.tuning.chunk_bytes = 128; }},
};

// The odd rank calls `odd`, the others `common`; then all call `common`.
void check(const std::vector<int32_t>& layout, int odd_rank, const AttentionProblem& common,
           const AttentionProblem& odd, const std::string& says) {
  RankJob job;
  job.node_of_rank = layout;
  const auto failures = run_rank_threads(job, [&](RankSession& session) {
    for (const bool backward : {false, true}) {
      mk_ring_attention_maxima_t maxima = MK_RING_ATTENTION_MAXIMA_INIT;
      maxima.batch = 2, maxima.seq = 24, maxima.heads = maxima.kv_heads = 2, maxima.dim = 16;
      maxima.num_sequences = 3;
      const auto prepare = backward ? mk_ring_attention_backward_prepare : mk_ring_attention_prepare;
      if (!session.ok(prepare(session.comm(), &maxima), "prepare")) return;
      AttentionLaunch launch(session, session.rank() == odd_rank ? odd : common);
      if (!(backward ? launch.backward() : launch.forward())) return;
      const mk_status_t status = mk_comm_synchronize(session.comm(), nullptr);
      const std::string sentence = mk_get_last_error(session.comm());
      const bool named = sentence.find("rank " + std::to_string(odd_rank) + " ") != std::string::npos ||
                         sentence.find("ranks ") != std::string::npos;
      if (status != MK_ERROR_MISMATCH || !named || sentence.find(says) == std::string::npos)
        session.fail("expected MK_ERROR_MISMATCH and \"" + says + "\", saw " + mk_status_string(status) + ": " +
                     sentence);
      if (!session.ok(mk_comm_clear_async_error(session.comm()), "mk_comm_clear_async_error")) return;
      if (!run_attention(session, common, backward ? Direction::backward : Direction::forward, false, false))
        return;
    }
  });
  INFO(says << ", odd rank " << odd_rank << "\n" << join_lines(failures));
  REQUIRE(failures.empty());
}

AttentionCase common_case() {
  AttentionCase attention;
  attention.seq = 24;
  attention.heads = attention.kv_heads = 2;
  attention.dim = 16;
  return attention;
}

}  // namespace

TEST_CASE("Every field of attention that ranks have to agree on") {
  const AttentionProblem common(common_case());
  for (const auto& layout : {std::vector<int32_t>{0, 0}, {0, 0, 1}}) {
    int odd_rank = 0;
    for (const Odd& difference : kOdd) {
      AttentionCase changed = common_case();
      difference.change(changed);
      check(layout, odd_rank, common, AttentionProblem(changed), difference.says);
      odd_rank = (odd_rank + 1) % static_cast<int>(layout.size());
    }
  }
}

TEST_CASE("cu_seqlens that differ") {
  for (const mk_causal_t causal : {MK_CAUSAL_NONE, MK_CAUSAL_ZIGZAG}) {
    AttentionCase packed = common_case();
    packed.causal = causal;
    packed.cu_seqlens = {0, 9, 24};
    AttentionCase other = packed;
    other.cu_seqlens = {0, 10, 24};
    check({0, 0, 1}, 1, AttentionProblem(packed), AttentionProblem(other), "cu_seqlens of hash");
    // Bad on one rank only.
    const AttentionProblem common(packed);
    RankJob job;
    job.node_of_rank = {0, 1};
    const auto failures = run_rank_threads(job, [&](RankSession& session) {
      AttentionLaunch launch(session, common);
      if (session.rank() == 1) launch.cu_seqlens = {0, 30, 24};
      if (!launch.forward()) return;
      const mk_status_t status = mk_comm_synchronize(session.comm(), nullptr);
      if (status != MK_ERROR_MISMATCH) session.fail(std::string("saw ") + mk_status_string(status));
      if (!session.ok(mk_comm_clear_async_error(session.comm()), "mk_comm_clear_async_error")) return;
      run_attention(session, common, Direction::both, false, false);
    });
    INFO(join_lines(failures));
    REQUIRE(failures.empty());
  }
}
