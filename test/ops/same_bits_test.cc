// SPDX-License-Identifier: MIT
// A result's bits depend on topology, shape and inputs, and on nothing else.
#include <deque>

#include "gemm_cases.h"
#include "gemm_launch.h"
#include "support/catch.h"

using namespace mk::test;

namespace {

// The four products: the three operators, and mode WGRAD of the first.
std::vector<GemmCase> random_numbers() {
  GemmCase gemm;
  gemm.m = 31;
  gemm.n = 29;
  gemm.k = 33;
  gemm.dtype = MK_DTYPE_BF16;
  gemm.out_dtype = MK_DTYPE_FP16;
  gemm.bias = true;
  gemm.integers = false;
  std::vector<GemmCase> cases;
  for (const mk_operator_t op : kGemmOperators) {
    gemm.op = op;
    cases.push_back(gemm);
  }
  gemm.op = MK_OPERATOR_ALLGATHER_GEMM;
  gemm.wgrad = true;
  gemm.bias = false;
  gemm.out_dtype = MK_DTYPE_FP32;
  gemm.accumulate = true;
  cases.push_back(gemm);
  return cases;
}

// The bits of every problem's result, `rounds` times, all in flight kSlots at a time.
bool collect(RankSession& session, const std::deque<GemmProblem>& problems, int rounds,
             std::vector<std::string>& bits) {
  std::deque<GemmLaunch> launches;
  for (const GemmProblem& problem : problems) launches.emplace_back(session, problem);
  for (int round = 0; round < rounds; ++round) {
    for (size_t at = 0; at < launches.size(); ++at) {
      launches[at].reset_output();
      if (!launches[at].enqueue()) return false;
      const bool last = at + 1 == launches.size();
      if ((last || at % RankMemory::kSlots == 0) &&
          !session.ok(mk_comm_synchronize(session.comm(), nullptr), "mk_comm_synchronize")) {
        return false;
      }
    }
    for (GemmLaunch& launch : launches) {
      if (round == 0) launch.verify();
      bits.push_back(launch.result_bits());
    }
  }
  return true;
}

// Runs the problems on every rank; their results must have the same bits, on all ranks too for the all-reduce.
void check(const RankJob& job, const std::deque<GemmProblem>& problems, int rounds) {
  std::vector<std::vector<std::string>> bits(job.node_of_rank.size());
  const auto failures = run_rank_threads(job, [&](RankSession& session) {
    auto& own = bits[static_cast<size_t>(session.rank())];
    if (!collect(session, problems, rounds, own)) return;
    for (size_t at = 1; at < own.size(); ++at) {
      if (own[at] != own[0]) session.fail("run " + std::to_string(at) + " has other bits");
    }
  });
  INFO(describe(problems[0].gemm) << "\n" << join_lines(failures));
  REQUIRE(failures.empty());
  if (problems[0].gemm.op != MK_OPERATOR_GEMM_ALLREDUCE) return;
  for (const auto& of_rank : bits) REQUIRE(of_rank[0] == bits[0][0]);
}

}  // namespace

TEST_CASE("200 runs give the same bits") {
  for (const auto& layout : {std::vector<int32_t>{0, 0, 0}, {0, 1, 0, 1, 0}}) {
    RankJob job;
    job.node_of_rank = layout;
    job.host_threads = 2;
    for (GemmCase gemm : random_numbers()) {
      gemm.tuning.tile_m = 4;
      gemm.tuning.tile_n = 16;
      gemm.tuning.chunk_bytes = 300;
      check(job, make_problems(std::vector<GemmCase>(RankMemory::kSlots, gemm), job.nranks()),
            200 / RankMemory::kSlots);
    }
  }
}

TEST_CASE("Threads, tiles and chunks do not change the bits") {
  for (const auto& layout : {std::vector<int32_t>{0, 0, 0}, {0, 0, 1, 1}, {0, 1, 0, 1, 0, 2}}) {
    RankJob job;
    job.node_of_rank = layout;
    for (GemmCase gemm : random_numbers()) {
      std::deque<GemmProblem> variants;
      for (const int threads : {1, 2, 3, 4}) {
        for (const int64_t chunk_bytes : {1, 200, 1000, 0}) {
          gemm.tuning.compute_ctas = threads;
          gemm.tuning.chunk_bytes = chunk_bytes;
          gemm.tuning.tile_m = chunk_bytes == 0 ? 0 : threads;
          gemm.tuning.tile_n = chunk_bytes == 0 ? 0 : 7 * threads;
          variants.emplace_back(gemm, job.nranks());
        }
      }
      check(job, variants, 1);
    }
  }
}
