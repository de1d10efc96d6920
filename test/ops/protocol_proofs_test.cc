// SPDX-License-Identifier: MIT
// The checks can fail: with one wait taken out of the protocol they do.
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>

#include "gemm_launch.h"
#include "kernels/host/hooks.h"
#include "support/catch.h"

using namespace mk::test;

namespace {

// Hooks for as long as it lives; no communicator outlives it.
struct Hooked {
  explicit Hooked(mk::HostHooks hooks_in) : hooks(std::move(hooks_in)) { mk::host_hooks = &hooks; }
  ~Hooked() { mk::host_hooks = nullptr; }
  mk::HostHooks hooks;
};

// A chunk of rank 0 leaves 200 ms late: whoever does not wait for its flag computes with what was there before.
std::vector<std::string> run_with_late_chunk(mk_operator_t op, bool wgrad, bool ignore_flags) {
  GemmCase gemm;
  gemm.op = op;
  gemm.wgrad = wgrad;
  gemm.m = 24;
  gemm.n = gemm.k = 16;
  const GemmProblem problem(gemm, 3);
  const auto start = std::chrono::steady_clock::now();
  mk::HostHooks hooks;
  hooks.ignore_flags = ignore_flags;
  hooks.hold = [start](int rank, int, int) {
    return rank == 0 && std::chrono::steady_clock::now() - start < std::chrono::milliseconds(200);
  };
  const Hooked hooked(hooks);
  RankJob job;
  job.node_of_rank = {0, 0, 0};
  return run_rank_threads(job, [&](RankSession& session) { run_launch(session, problem, nullptr, true); });
}

// Rank 0 owns the only row and needs nothing of rank 1, which enters its first launch when rank 0 has done all
// three, or after a while.
std::vector<std::string> run_with_late_rank(bool skip_entry_wait) {
  std::deque<GemmProblem> problems;
  for (uint64_t seed = 1; seed <= 3; ++seed) {
    GemmCase gemm;
    gemm.m = 1;
    gemm.n = gemm.k = 32;
    gemm.seed = seed;
    problems.emplace_back(gemm, 2);
  }
  mk::HostHooks hooks;
  hooks.skip_entry_wait = skip_entry_wait;
  const Hooked hooked(hooks);
  std::mutex mutex;
  std::condition_variable changed;
  bool rank_0_done = false;
  RankJob job;
  job.node_of_rank = {0, 0};
  return run_rank_threads(job, [&](RankSession& session) {
    std::deque<GemmLaunch> launches;
    for (const GemmProblem& problem : problems) launches.emplace_back(session, problem);
    if (!launches[0].prepare()) return;
    if (session.rank() == 1) {
      std::unique_lock lock(mutex);
      const auto limit = std::chrono::system_clock::now() + std::chrono::milliseconds(300);
      while (!rank_0_done && changed.wait_until(lock, limit) != std::cv_status::timeout) {
      }
    }
    for (GemmLaunch& launch : launches) {
      if (!launch.enqueue()) return;
    }
    if (!session.ok(mk_comm_synchronize(session.comm(), nullptr), "mk_comm_synchronize")) return;
    if (session.rank() == 0) {
      std::lock_guard lock(mutex);
      rank_0_done = true;
      changed.notify_all();
    }
    for (GemmLaunch& launch : launches) launch.verify();
  });
}

}  // namespace

TEST_CASE("Without waiting for chunks results are wrong") {
  for (const mk_operator_t op :
       {MK_OPERATOR_ALLGATHER_GEMM, MK_OPERATOR_GEMM_REDUCE_SCATTER, MK_OPERATOR_GEMM_ALLREDUCE}) {
    for (const bool wgrad : {false, true}) {
      if (wgrad && op != MK_OPERATOR_ALLGATHER_GEMM) continue;
      REQUIRE(join_lines(run_with_late_chunk(op, wgrad, false)).empty());
#if !defined(__SANITIZE_THREAD__)  // which rightly calls this a race
      REQUIRE_FALSE(run_with_late_chunk(op, wgrad, true).empty());
#endif
    }
  }
}

TEST_CASE("Without waiting for entries a rank overwrites what a late one has not read") {
  REQUIRE(join_lines(run_with_late_rank(false)).empty());
  const auto failures = run_with_late_rank(true);
  INFO(join_lines(failures));
  REQUIRE_FALSE(failures.empty());
}
