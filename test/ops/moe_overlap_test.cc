// SPDX-License-Identifier: MIT
// With one chunk of tokens or of expert rows held back, every row block and every token that does not need it
// completes, on every rank; and then the rest.
#include <algorithm>
#include <chrono>
#include <memory>
#include <set>

#include "moe_launch.h"
#include "observer.h"
#include "support/catch.h"

using namespace mk::test;

namespace {

using Counts = std::map<std::pair<int, int>, int>;  // (rank, block): times done

// Chunks of one token or row, blocks of one row or token.
MoeCase single_chunks() {
  MoeCase moe;
  moe.same_tokens = true;
  moe.tokens = 9;
  moe.experts = 8;
  moe.topk = 3;
  moe.tuning.chunk_bytes = 1;
  moe.tuning.tile_m = 1;
  moe.tuning.compute_ctas = 2;
  return moe;
}

// The tokens of `source` that go to one of the experts of `ranks`, in their order.
std::vector<int64_t> tokens_to(const MoeProblem& problem, int source, const std::set<int>& ranks) {
  std::vector<int64_t> tokens;
  for (int64_t token = 0; token < problem.moe.tokens_of(source); ++token) {
    for (int k = 0; k < problem.moe.topk; ++k) {
      const int64_t expert = problem.expert(source, token, k);
      const auto owns = [&](int rank) {
        return expert >= problem.first_expert(rank) && expert < problem.first_expert(rank + 1);
      };
      if (std::none_of(ranks.begin(), ranks.end(), owns)) continue;
      tokens.push_back(token);
      break;
    }
  }
  return tokens;
}

void require_overlap(const RankJob& job, const MoeProblem& problem, const Observer::IsHeld& is_held,
                     const Counts& most, const Counts& all, bool combine) {
  REQUIRE(most.size() < all.size());
  std::unique_ptr<Observer> observer;
  std::string while_held, at_the_end;
  std::thread watcher;
  const auto watch = [&] {
    observer = std::make_unique<Observer>(is_held);
    watcher = std::thread([&] {
      while_held = observer->settles_at(most);
      observer->release();
      at_the_end = observer->settles_at(all);
    });
  };
  if (!combine) watch();
  std::atomic<int> dispatched{0};
  std::atomic<bool> watching{!combine};
  const auto failures = run_rank_threads(job, [&](RankSession& session) {
    MoeLaunch launch(session, problem);
    if (!launch.prepare() || !launch.enqueue_dispatch()) return;
    if (combine) {  // the hooks are for the second launch only
      if (!launch.synchronize()) return;
      if (++dispatched == job.nranks()) watch(), watching = true;
      const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(20);
      while (!watching && std::chrono::steady_clock::now() < limit)
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      if (!launch.enqueue_combine()) return;
    }
    if (!launch.synchronize()) return;
    combine ? launch.verify_combine() : launch.verify_dispatch();
  });
  if (watcher.joinable()) watcher.join();
  INFO("while held: " << while_held << "\nat the end: " << at_the_end << "\n" << join_lines(failures));
  REQUIRE(while_held.empty());
  REQUIRE(at_the_end.empty());
  REQUIRE(failures.empty());
}

// Blocks of a dispatch: rows of each rank. late(rank): tokens of `source` that it gets later.
std::pair<Counts, Counts> dispatch_counts(const MoeProblem& problem, int source,
                                          const std::function<std::set<int64_t>(int rank)>& late) {
  Counts most, all;
  for (int rank = 0; rank < problem.nranks; ++rank) {
    const std::set<int64_t> tokens = late(rank);
    int block = 0;
    for (int expert = problem.first_expert(rank); expert < problem.first_expert(rank + 1); ++expert) {
      for (const MoeRow& row : problem.rows(expert)) {
        all[{rank, block}] = 1;
        if (row.rank != source || !tokens.contains(row.token)) most[{rank, block}] = 1;
        ++block;
      }
    }
  }
  return {most, all};
}

}  // namespace

TEST_CASE("Dispatch: a chunk that does not leave its rank delays the rows of its tokens only") {
  for (const auto& layout : {std::vector<int32_t>{0, 0, 0}, {0, 0, 1, 1}, {0, 1, 0, 1, 0}}) {
    RankJob job;
    job.node_of_rank = layout;
    const MoeProblem problem(single_chunks(), job.nranks());
    // Chunk 1 for every rank of the node and for every other node.
    const auto late = [&](int rank) {
      std::set<int> group{rank};
      for (int other = 0; layout[static_cast<size_t>(rank)] != layout[1] && other < job.nranks(); ++other) {
        if (layout[static_cast<size_t>(other)] == layout[static_cast<size_t>(rank)]) group.insert(other);
      }
      const std::vector<int64_t> tokens = tokens_to(problem, 1, group);
      return tokens.size() > 1 ? std::set<int64_t>{tokens[1]} : std::set<int64_t>{};
    };
    const auto [most, all] = dispatch_counts(problem, 1, late);
    require_overlap(
        job, problem, [](int rank, int source, int chunk) { return rank == 1 && source == 1 && chunk == 1; },
        most, all, false);
  }
}

TEST_CASE("Dispatch: a chunk that its relay does not forward delays that node only") {
  RankJob job;
  job.node_of_rank = {0, 0, 1, 1, 1};
  const MoeProblem problem(single_chunks(), job.nranks());
  // Rank 2 takes rank 0's tokens from the network for the ranks 2, 3 and 4.
  const std::vector<int64_t> tokens = tokens_to(problem, 0, {2, 3, 4});
  const auto [most, all] = dispatch_counts(
      problem, 0, [&](int rank) { return rank >= 2 ? std::set<int64_t>{tokens.at(2)} : std::set<int64_t>{}; });
  require_overlap(
      job, problem, [](int rank, int source, int chunk) { return rank == 2 && source == 0 && chunk == 2; },
      most, all, false);
}

TEST_CASE("Combine: an expert row that is missing delays its own token only") {
  for (const auto& layout : {std::vector<int32_t>{0, 0, 0}, {0, 0, 1, 1}, {0, 1, 0, 1, 0}}) {
    RankJob job;
    job.node_of_rank = layout;
    const MoeProblem problem(single_chunks(), job.nranks());
    // The first row that rank 1 has for rank 0.
    int64_t token = -1;
    for (int expert = problem.first_expert(1); expert < problem.first_expert(2) && token < 0; ++expert) {
      for (const MoeRow& row : problem.rows(expert)) {
        if (row.rank == 0 && token < 0) token = row.token;
      }
    }
    REQUIRE(token >= 0);
    Counts most, all;
    for (int rank = 0; rank < job.nranks(); ++rank) {
      for (int64_t block = 0; block < problem.moe.tokens_of(rank); ++block) {
        all[{rank, static_cast<int>(block)}] = 1;
        if (rank != 0 || block != token) most[{rank, static_cast<int>(block)}] = 1;
      }
    }
    require_overlap(
        job, problem, [](int rank, int home, int chunk) { return rank == 1 && home == 0 && chunk == 0; }, most,
        all, true);
  }
}

TEST_CASE("A chunk of tokens, a row or a sum that does not come is named") {
  struct Late {
    std::vector<int32_t> layout;
    bool combine;
    Observer::IsHeld is_held;
    int waiter;
    std::vector<std::string> says;  // one of them: the rank at fault and those that wait race to say it
  };
  const auto of = [](int rank, int source) {
    return [rank, source](int at, int of_rank, int) { return at == rank && of_rank == source; };
  };
  // One rank's tokens that do not leave; its expert rows for rank 0, at home and on their way over another
  // node.
  for (const Late& late : {Late{{0, 0}, false, of(1, 1), 0, {"for chunk 0 of rank 1"}},
                           {{0, 1}, false, of(1, 1), 0, {"for chunk 0 of rank 1"}},
                           {{0, 0}, true, of(1, 0), 0, {"for partial ", "for held tile"}},
                           {{0, 1}, true, of(1, 0), 0, {"for node sum ", "for partial ", "for held tile"}}}) {
    RankJob job;
    job.node_of_rank = late.layout;
    job.wait_timeout_ms = 400;
    const MoeProblem problem(single_chunks(), job.nranks());
    std::unique_ptr<Observer> observer;
    std::atomic<int> dispatched{0};
    std::string sentence;
    run_rank_threads(job, [&](RankSession& session) {
      MoeLaunch launch(session, problem);
      if (!launch.prepare()) return;
      if (late.combine && (!launch.enqueue_dispatch() || !launch.synchronize())) return;
      if (++dispatched == job.nranks()) observer = std::make_unique<Observer>(late.is_held), dispatched = 1000;
      const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(20);
      while (dispatched < 1000 && std::chrono::steady_clock::now() < limit)
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      if (!(late.combine ? launch.enqueue_combine() : launch.enqueue_dispatch())) return;
      const mk_status_t seen = mk_comm_synchronize(session.comm(), nullptr);
      if (session.rank() == late.waiter) sentence = mk_get_last_error(session.comm());
      session.ok(seen, "mk_comm_synchronize");
    });
    INFO(late.says[0] << ": " << sentence);
    REQUIRE(sentence.find(late.combine ? "moe_gemm_combine" : "moe_dispatch_gemm") != std::string::npos);
    REQUIRE(std::any_of(late.says.begin(), late.says.end(),
                        [&](const std::string& text) { return sentence.find(text) != std::string::npos; }));
    const bool by_itself = sentence.find("for held tile") != std::string::npos;
    REQUIRE((by_itself || sentence.find("of rank 1: saw") != std::string::npos));
    observer.reset();
  }
}
