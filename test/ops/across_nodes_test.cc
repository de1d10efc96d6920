// SPDX-License-Identifier: MIT
// The host operators across nodes, over the backend that MK_TRANSPORT names: exact on 2x2, 4x1, 2x3, 3x2 and
// 4x4 ranks, and the bytes that the transport took for each peer are the plan's figure.
#include <cstdlib>
#include <string>

#include "attention_launch.h"
#include "gemm_cases.h"
#include "gemm_launch.h"
#include "kernels/protocol.h"
#include "lib/api.h"
#include "moe_launch.h"
#include "support/catch.h"
#include "support/sanitizers.h"

using namespace mk::test;

namespace {

struct Layout {
  const char* name;  // nodes x ranks of a node
  std::vector<int32_t> node_of_rank;
};

const std::vector<Layout>& layouts() {
  static const std::vector<Layout> all = {
      {"2x2", {0, 0, 1, 1}},
      {"4x1", {0, 1, 2, 3}},
      {"2x3", {0, 0, 0, 1, 1, 1}},
      {"3x2", {0, 1, 2, 0, 1, 2}},
      {"4x4", {0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3}},
  };
  return all;
}

void require_none(const std::vector<std::string>& failures) {
  INFO(join_lines(failures));
  REQUIRE(failures.empty());
}

RankJob job_of(const Layout& layout) {
  RankJob job;
  job.node_of_rank = layout.node_of_rank;
  return job;
}

// Fewer with many ranks, which share the cores of the machine.
size_t num_calls(const RankJob& job, size_t most) { return job.nranks() > 8 ? most / 4 : most; }

// Bytes that this rank's transport has taken, by peer.
std::vector<int64_t> sent_bytes(const RankSession& session) {
  const auto communicator = mk::api::communicators().find(reinterpret_cast<uint64_t>(session.comm()));
  std::vector<int64_t> bytes;
  for (int peer = 0; peer < session.nranks(); ++peer) {
    bytes.push_back(static_cast<int64_t>(communicator->endpoint()->sent_bytes(peer)));
  }
  return bytes;
}

// What each peer was sent since `before`, against the plan; `alike`: to each node the same.
void check_sent(RankSession& session, const std::vector<int64_t>& before, const mk_plan_t& plan,
                const std::vector<int32_t>& node_of_rank, bool alike) {
  const auto after = sent_bytes(session);
  int num_nodes = 0;
  for (const int32_t node : node_of_rank) num_nodes = std::max(num_nodes, node + 1);
  const int32_t own_node = node_of_rank[static_cast<size_t>(session.rank())];
  constexpr int64_t kEntry = sizeof(mk::EntryRecord);
  int64_t sum = 0;
  int links = 0;
  for (int peer = 0; peer < session.nranks(); ++peer) {
    const int64_t sent = after[static_cast<size_t>(peer)] - before[static_cast<size_t>(peer)];
    if (sent > 0 && node_of_rank[static_cast<size_t>(peer)] == own_node)
      session.fail("bytes went through the network to rank " + std::to_string(peer) + " of the same node");
    const int64_t each = plan.network_bytes / (num_nodes - 1) + kEntry;
    if (sent > 0 && alike && sent != each)
      session.fail("rank " + std::to_string(peer) + " was sent " + std::to_string(sent) + " bytes, expected " +
                   std::to_string(each));
    links += sent > 0;
    sum += sent;
  }
  // Each other node is told of the launch by one entry record to this rank's rail peer there.
  const int64_t expected = plan.network_bytes + kEntry * (num_nodes - 1);
  if (links != num_nodes - 1 || sum != expected)
    session.fail("sent " + std::to_string(sum) + " bytes over " + std::to_string(links) + " links, expected " +
                 std::to_string(expected) + " over " + std::to_string(num_nodes - 1));
}

// One launch each, counted.
void count_launch(RankSession& session, const GemmProblem& problem, const std::vector<int32_t>& node_of_rank) {
  GemmLaunch launch(session, problem);
  mk_plan_t plan = MK_PLAN_INIT;
  if (!launch.prepare() || !session.ok(launch.plan(&plan), "plan")) return;
  const auto before = sent_bytes(session);
  if (!launch.enqueue() || !session.ok(mk_comm_synchronize(session.comm(), nullptr), "mk_comm_synchronize"))
    return;
  launch.verify();
  check_sent(session, before, plan, node_of_rank, problem.gemm.op == MK_OPERATOR_ALLGATHER_GEMM);
}

void count_launch(RankSession& session, const AttentionProblem& problem, bool backward,
                  const std::vector<int32_t>& node_of_rank) {
  AttentionLaunch launch(session, problem);
  mk_plan_t plan = MK_PLAN_INIT;
  if (!session.ok(AttentionLaunch::try_prepare(session.comm(), problem.attention, backward), "prepare") ||
      !session.ok(launch.plan(backward, &plan), "plan"))
    return;
  const auto before = sent_bytes(session);
  if (!(backward ? launch.backward() : launch.forward()) ||
      !session.ok(mk_comm_synchronize(session.comm(), nullptr), "mk_comm_synchronize"))
    return;
  backward ? launch.verify_backward() : launch.verify_forward();
  // In order, keys travel to later ranks alone; without a mask to all nodes.
  const bool alike = !backward && problem.attention.causal == MK_CAUSAL_NONE;
  check_sent(session, before, plan, node_of_rank, alike);
}

}  // namespace

TEST_CASE("GEMM operators are exact across nodes") {
  for (const Layout& layout : fewer_if_slow(layouts())) {
    const RankJob job = job_of(layout);
    const auto problems = make_problems(mixed_cases(31, num_calls(job, 24), job.nranks()), job.nranks());
    INFO(layout.name);
    require_none(run_rank_threads(job, [&](RankSession& session) {
      run_problems(session, problems, [](size_t number) { return number % 2 == 0; });
    }));
  }
}

TEST_CASE("Expert operators are exact across nodes") {
  for (const Layout& layout : fewer_if_slow(layouts())) {
    const RankJob job = job_of(layout);
    std::vector<MoeCase> cases;
    for (uint64_t seed = 1; seed <= num_calls(job, 8); ++seed) {
      MoeCase& moe = cases.emplace_back();
      moe.seed = seed;
      moe.tokens = static_cast<int64_t>(3 + 5 * seed);
      moe.experts = 2 * job.nranks() + static_cast<int>(seed % 3);
      moe.topk = 1 + static_cast<int>(seed % 4);
      moe.dispatched_rows = seed % 2 == 0;
      moe.spread = static_cast<Spread>(seed % 5);
    }
    const auto problems = make_problems(cases, job.nranks());
    INFO(layout.name);
    require_none(run_rank_threads(job, [&](RankSession& session) {
      for (size_t number = 0; number < problems.size(); ++number) {
        if (!run_layer(session, problems[number], number % 2 == 0)) return;
      }
    }));
  }
}

TEST_CASE("Attention and its gradients are exact across nodes") {
  for (const Layout& layout : fewer_if_slow(layouts())) {
    const RankJob job = job_of(layout);
    std::vector<AttentionCase> cases;
    for (const mk_causal_t causal : {MK_CAUSAL_NONE, MK_CAUSAL_ZIGZAG}) {
      AttentionCase& attention = cases.emplace_back();
      attention.seq = 8 * job.nranks() + 5;
      attention.causal = causal;
    }
    const auto problems = make_problems(cases);
    INFO(layout.name);
    require_none(run_rank_threads(job, [&](RankSession& session) {
      for (const AttentionProblem& problem : problems) {
        if (!run_attention(session, problem, Direction::both, true, true)) return;
      }
    }));
  }
}

TEST_CASE("The transport sends each peer the bytes that the plan says") {
  for (const Layout& layout : fewer_if_slow(layouts())) {
    const RankJob job = job_of(layout);
    std::deque<GemmProblem> problems;
    for (const mk_operator_t op : kGemmOperators) {
      GemmCase gemm;
      gemm.op = op;
      gemm.m = 20 * job.nranks() + 3;
      gemm.n = 72;
      gemm.k = 40;
      problems.emplace_back(gemm, job.nranks());
    }
    std::vector<AttentionCase> cases;
    for (const mk_causal_t causal : {MK_CAUSAL_NONE, MK_CAUSAL_CONTIGUOUS, MK_CAUSAL_ZIGZAG}) {
      AttentionCase& attention = cases.emplace_back();
      attention.seq = 8 * job.nranks() + 5;
      attention.causal = causal;
    }
    const auto attentions = make_problems(cases);
    INFO(layout.name);
    require_none(run_rank_threads(job, [&](RankSession& session) {
      for (const GemmProblem& problem : problems) count_launch(session, problem, layout.node_of_rank);
      for (const AttentionProblem& problem : attentions) {
        for (const bool backward : {false, true}) count_launch(session, problem, backward, layout.node_of_rank);
      }
    }));
  }
}
