// SPDX-License-Identifier: MIT
// With one chunk of keys held back, every tile of queries takes all other chunks that it sees, on every rank,
// and the tiles that do not see it are finished; then the rest. And without waiting for chunks results are
// wrong.
#include <chrono>
#include <functional>
#include <map>
#include <utility>

#include "attention_launch.h"
#include "kernels/host/hooks.h"
#include "observer.h"
#include "support/catch.h"

using namespace mk::test;

namespace {

constexpr int kChunks = 3;  // of every rank's rows
constexpr int kChunkRows = 4;
constexpr int kHeads = 2;
constexpr int kDim = 8;

using Counts = std::map<std::pair<int, int>, int>;  // (rank, source)

AttentionCase chunked(int nranks, mk_causal_t causal) {
  AttentionCase attention;
  attention.seq = int64_t{nranks} * kChunks * kChunkRows;
  attention.heads = kHeads;
  attention.dim = kDim;
  attention.causal = causal;
  attention.tuning.tile_m = kChunkRows;
  attention.tuning.chunk_bytes = kChunkRows * kDim * 2 * 2;
  return attention;
}

// Does a tile of queries (its number at `rank`) see a chunk of `source`?
bool sees(const AttentionCase& attention, int nranks, int rank, int tile, int source, int chunk) {
  const auto queries = attention.positions(nranks, rank);
  const auto keys = attention.positions(nranks, source);
  for (int i = tile * kChunkRows; i < (tile + 1) * kChunkRows; ++i) {
    const auto [begin, end] = attention.visible(queries[static_cast<size_t>(i)]);
    for (int j = chunk * kChunkRows; j < (chunk + 1) * kChunkRows; ++j) {
      const int64_t key = keys[static_cast<size_t>(j)];
      if (begin <= key && key < end) return true;
    }
  }
  return false;
}

// What there is to do when `lacks(rank)` has not got chunk `chunk` of rank `late`: each tile takes each chunk
// that it sees; in the backward call too, and then every chunk that came is a unit of dK and dV, and the
// owner's chunk is done when all units for it are.
Counts count(const AttentionCase& attention, int nranks, bool backward, int late, int chunk,
             const std::function<bool(int rank)>& lacks) {
  Counts counts;
  for (int rank = 0; rank < nranks; ++rank) {
    for (int source = 0; source < nranks; ++source) {
      for (int c = 0; c < kChunks; ++c) {
        int tiles = 0;
        for (int tile = 0; tile < kChunks; ++tile)
          tiles += sees(attention, nranks, rank, tile, source, c) ? 1 : 0;
        if (tiles == 0 || (source == late && c == chunk && lacks(rank))) continue;
        counts[{rank, source}] += kHeads * tiles + (backward ? 1 : 0);
      }
    }
  }
  for (int rank = 0; rank < nranks && backward; ++rank) {
    for (int c = 0; c < kChunks; ++c) {
      bool whole = true;
      for (int other = 0; other < nranks; ++other) {
        bool needs = false;
        for (int tile = 0; tile < kChunks; ++tile)
          needs = needs || sees(attention, nranks, other, tile, rank, c);
        if (needs && rank == late && c == chunk && lacks(other)) whole = false;
      }
      if (whole) ++counts[{rank, rank}];
    }
  }
  return counts;
}

void check(const std::vector<int32_t>& layout, mk_causal_t causal, int late, const Observer::IsHeld& is_held,
           const std::function<bool(int rank)>& lacks) {
  constexpr int kChunk = 1;
  RankJob job;
  job.node_of_rank = layout;
  job.host_threads = 2;
  const int nranks = job.nranks();
  const AttentionProblem problem(chunked(nranks, causal));
  for (const bool backward : {false, true}) {
    const Counts most = count(problem.attention, nranks, backward, late, kChunk, lacks);
    const Counts all = count(problem.attention, nranks, backward, late, kChunk, [](int) { return false; });
    REQUIRE(most != all);
    Observer observer(is_held);
    std::string while_held, at_the_end;
    std::thread watcher([&] {
      while_held = observer.settles_at(most);
      observer.release();
      at_the_end = observer.settles_at(all);
    });
    const auto failures = run_rank_threads(job, [&](RankSession& session) {
      run_attention(session, problem, backward ? Direction::backward : Direction::forward, true, false);
    });
    watcher.join();
    INFO((backward ? "backward, " : "forward, ")
         << "while held: " << while_held << "\nat the end: " << at_the_end << "\n"
         << join_lines(failures));
    REQUIRE(while_held.empty());
    REQUIRE(at_the_end.empty());
    REQUIRE(failures.empty());
  }
}

}  // namespace

TEST_CASE("A chunk of keys that does not leave its rank delays what sees it only") {
  for (const auto& layout : {std::vector<int32_t>{0, 0, 0}, {0, 0, 1, 1}, {0, 1, 0, 1, 0}}) {
    for (const mk_causal_t causal : {MK_CAUSAL_NONE, MK_CAUSAL_CONTIGUOUS, MK_CAUSAL_ZIGZAG}) {
      check(
          layout, causal, 1,
          [](int rank, int source, int chunk) { return rank == 1 && source == 1 && chunk == 1; },
          [](int rank) { return rank != 1; });
    }
  }
}

TEST_CASE("A chunk of keys that its relay does not forward delays that node only") {
  // Rank 2 takes rank 0's chunks from the network for the ranks 2, 3 and 4.
  check(
      {0, 0, 1, 1, 1}, MK_CAUSAL_ZIGZAG, 0,
      [](int rank, int source, int chunk) { return rank == 2 && source == 0 && chunk == 1; },
      [](int rank) { return rank >= 3; });
}

TEST_CASE("A chunk of keys that never comes is named by whoever waits for it") {
  const AttentionProblem problem(chunked(3, MK_CAUSAL_NONE));
  for (const bool backward : {false, true}) {
    mk::HostHooks hooks;
    hooks.hold = [](int rank, int source, int chunk) { return rank == 1 && source == 1 && chunk == 2; };
    mk::host_hooks = &hooks;
    RankJob job;
    job.node_of_rank = {0, 0, 1};
    job.wait_timeout_ms = 400;
    const auto failures = run_rank_threads(job, [&](RankSession& session) {
      run_attention(session, problem, backward ? Direction::backward : Direction::forward, true, false);
    });
    mk::host_hooks = nullptr;
    const std::string text = join_lines(failures);
    INFO(text);
    REQUIRE(failures.size() == 3);
    REQUIRE(text.find("MK_ERROR_TIMEOUT") != std::string::npos);
    REQUIRE(text.find(backward ? "ring_attention_backward" : "in ring_attention") != std::string::npos);
    REQUIRE((text.find("chunk 2 of rank 1") != std::string::npos ||
             text.find("partial 2 of rank") != std::string::npos));
  }
}

TEST_CASE("Without waiting for chunks attention is wrong") {
  const AttentionProblem problem(chunked(3, MK_CAUSAL_NONE));
  for (const bool ignore_flags : {false, true}) {
#if defined(__SANITIZE_THREAD__)  // which rightly calls this a race
    if (ignore_flags) continue;
#endif
    for (const Direction direction : {Direction::forward, Direction::backward}) {
      const auto start = std::chrono::steady_clock::now();
      mk::HostHooks hooks;
      hooks.ignore_flags = ignore_flags;
      hooks.hold = [start](int rank, int, int) {
        return rank == 0 && std::chrono::steady_clock::now() - start < std::chrono::milliseconds(200);
      };
      mk::host_hooks = &hooks;
      RankJob job;
      job.node_of_rank = {0, 0, 0};
      const auto failures = run_rank_threads(
          job, [&](RankSession& session) { run_attention(session, problem, direction, true, false); });
      mk::host_hooks = nullptr;
      INFO(join_lines(failures));
      REQUIRE(failures.empty() == !ignore_flags);
    }
  }
}
