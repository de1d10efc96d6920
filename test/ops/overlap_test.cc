// SPDX-License-Identifier: MIT
// With one chunk held back, everything that does not depend on it completes, on every rank; and then the rest.
#include <map>
#include <thread>

#include "gemm_launch.h"
#include "observer.h"
#include "support/catch.h"

using namespace mk::test;

namespace {

constexpr int kChunks = 3;  // of every rank's rows
constexpr int kTileRows = 4;

// A launch whose C has kTiles tiles, each of which needs every chunk of every rank.
constexpr int kTiles = 4;
GemmCase chunked_wgrad(int nranks) {
  GemmCase gemm;
  gemm.wgrad = true;
  gemm.m = int64_t{nranks} * kChunks * kTileRows;
  gemm.n = 24;
  gemm.k = 2 * kTileRows;
  gemm.out_dtype = MK_DTYPE_FP32;
  gemm.accumulate = true;
  gemm.tuning.tile_m = kTileRows;
  gemm.tuning.tile_n = 16;
  gemm.tuning.chunk_bytes = kTileRows * 24 * 2;
  return gemm;
}

GemmCase chunked(mk_operator_t op, int nranks) {
  GemmCase gemm;
  gemm.op = op;
  gemm.m = int64_t{nranks} * kChunks * kTileRows;
  gemm.n = 24;
  gemm.k = 24;
  gemm.tuning.tile_m = kTileRows;
  gemm.tuning.tile_n = 16;
  gemm.tuning.chunk_bytes = kTileRows * 24 * 2;
  if (op == MK_OPERATOR_ALLGATHER_GEMM) gemm.gathered = Gathered::plain;
  return gemm;
}

// Runs a launch with `is_held`. Of source's rows a rank finishes all(rank, source) units, and while_held(rank,
// source) of them meanwhile.
using Count = std::function<int(int rank, int source)>;
void check(const GemmCase& gemm, const std::vector<int32_t>& layout, const Observer::IsHeld& is_held,
           const Count& count_all, const Count& count_held) {
  RankJob job;
  job.node_of_rank = layout;
  const int nranks = job.nranks();
  std::map<std::pair<int, int>, int> most, all;
  for (int rank = 0; rank < nranks; ++rank) {
    for (int source = 0; source < nranks; ++source) {
      if (count_all(rank, source) == 0) continue;
      all[{rank, source}] = count_all(rank, source);
      if (count_held(rank, source) > 0) most[{rank, source}] = count_held(rank, source);
    }
  }
  const GemmProblem problem(gemm, nranks);
  Observer observer(is_held);
  std::string while_held, at_the_end;
  std::thread watcher([&] {
    while_held = observer.settles_at(most);
    observer.release();
    at_the_end = observer.settles_at(all);
  });
  const auto failures =
      run_rank_threads(job, [&](RankSession& session) { run_launch(session, problem, nullptr, true); });
  watcher.join();
  INFO("while held: " << while_held << "\nat the end: " << at_the_end << "\n" << join_lines(failures));
  REQUIRE(while_held.empty());
  REQUIRE(at_the_end.empty());
  REQUIRE(failures.empty());
}

// The units are chunks of C's rows; `lacks(rank, source)`: rank cannot finish one of source's meanwhile.
void check(mk_operator_t op, const std::vector<int32_t>& layout, const Observer::IsHeld& is_held,
           const std::function<bool(int rank, int source)>& lacks) {
  const auto all = [op](int rank, int source) {
    return op == MK_OPERATOR_GEMM_REDUCE_SCATTER && rank != source ? 0 : kChunks;
  };
  check(chunked(op, static_cast<int>(layout.size())), layout, is_held, all,
        [&](int rank, int source) { return all(rank, source) - (lacks(rank, source) ? 1 : 0); });
}

}  // namespace

TEST_CASE("All-gather: a chunk that does not leave its rank delays its own tiles only") {
  for (const auto& layout : {std::vector<int32_t>{0, 0, 0}, {0, 0, 1, 1}, {0, 1, 0, 1, 0}}) {
    check(
        MK_OPERATOR_ALLGATHER_GEMM, layout,
        [](int rank, int source, int chunk) { return rank == 1 && source == 1 && chunk == 1; },
        [](int rank, int source) { return source == 1 && rank != 1; });
  }
}

TEST_CASE("All-gather: a chunk that its relay does not forward delays that node only") {
  // Rank 2 takes rank 0's rows from the network for the ranks 2, 3 and 4.
  check(
      MK_OPERATOR_ALLGATHER_GEMM, {0, 0, 1, 1, 1},
      [](int rank, int source, int chunk) { return rank == 2 && source == 0 && chunk == 0; },
      [](int rank, int source) { return source == 0 && rank >= 3; });
}

TEST_CASE("Reductions: a partial that is missing delays its own rows only") {
  for (const auto& layout : {std::vector<int32_t>{0, 0, 0}, {0, 0, 1, 1}, {0, 1, 0, 1, 0}}) {
    for (const mk_operator_t op : {MK_OPERATOR_GEMM_REDUCE_SCATTER, MK_OPERATOR_GEMM_ALLREDUCE}) {
      for (const int slow : {0, 2}) {  // the owner itself, and another rank
        check(
            op, layout,
            [slow](int rank, int source, int chunk) { return rank == slow && source == 0 && chunk == 2; },
            [](int, int source) { return source == 0; });
      }
    }
  }
}

TEST_CASE("WGRAD: a chunk held back holds up its source's sums only, in every tile") {
  for (const auto& layout : {std::vector<int32_t>{0, 0, 0}, {0, 0, 1, 1}, {0, 1, 0, 1, 0}}) {
    for (const int chunk : {0, kChunks - 1}) {
      check(
          chunked_wgrad(static_cast<int>(layout.size())), layout,
          [chunk](int rank, int source, int at) { return rank == 1 && source == 1 && at == chunk; },
          [](int, int) { return kTiles; },
          [](int rank, int source) { return source == 1 && rank != 1 ? 0 : kTiles; });
    }
  }
}
