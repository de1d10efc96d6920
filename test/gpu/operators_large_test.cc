// SPDX-License-Identifier: MIT
// The ends of the range of sizes: matrices, receive areas and gathered rows beyond 2 and 4 GiB, every element
// checked; every number of columns from 1 to 300; inner dimensions of 0 to 8; fewer rows than ranks, and none.
//
//   operators_large_test [--ranks N] [--quick]
#include "operators_run.h"

namespace {

using namespace operators;

Tally tally;

constexpr mk_operator_t ALL_OPERATORS[] = {MK_OPERATOR_ALLGATHER_GEMM, MK_OPERATOR_GEMM_REDUCE_SCATTER,
                                           MK_OPERATOR_GEMM_ALLREDUCE};
constexpr double GIB = 1 << 30;

// What is large is in the name.
struct LargeCase {
  const char* name;
  Problem problem;
  bool is_quick;
};

std::vector<LargeCase> large_cases() {
  constexpr auto gather = MK_OPERATOR_ALLGATHER_GEMM;
  constexpr auto scatter = MK_OPERATOR_GEMM_REDUCE_SCATTER;
  constexpr auto reduce = MK_OPERATOR_GEMM_ALLREDUCE;
  constexpr auto fp32 = MK_DTYPE_FP32;
  return {
      {"gathered rows of 4.5 GiB", {.op = gather, .m = 65536, .n = 72, .k = 36872, .gathered = true}, true},
      {"gathered rows of 2.2 GiB", {.op = gather, .m = 17000, .n = 72, .k = 70000, .gathered = true}, false},
      {"C of 4.9 GiB", {.op = gather, .m = 32768, .n = 40008, .k = 64, .out = fp32}, true},
      {"B of 4.6 GiB", {.op = gather, .m = 256, .n = 70008, .k = 35208}, false},
      {"B of 4.6 GiB as [n, k]", {.op = gather, .m = 256, .n = 70008, .k = 35208, .transposed = true}, true},
      {"partials of 4.5 GiB", {.op = scatter, .m = 32768, .n = 73736, .k = 64}, true},
      {"partials of 4.3 GiB in fp32",
       {.op = scatter, .m = 16384, .n = 70008, .k = 64, .out = fp32, .comm = fp32},
       false},
      {"A of 4.5 GiB", {.op = scatter, .m = 65536, .n = 72, .k = 36872}, false},
      {"C and partials of 4.5 GiB",
       {.op = reduce, .m = 32768, .n = 73736, .k = 64, .algorithm = MK_ALGORITHM_TWO_SHOT},
       false},
      {"A of 4.5 GiB in an all-reduce", {.op = reduce, .m = 65536, .n = 72, .k = 36872}, false},
  };
}

// Device memory that a problem takes on a rank, the library's included.
double bytes_needed(const Rank& rank, const Problem& problem) {
  Sizes sizes;
  sizes.cover(problem, rank.rank, rank.nranks);
  mk_tuning_t tuning = MK_TUNING_INIT;
  tuning.algorithm = problem.algorithm;
  mk_gemm_maxima_t maxima = MK_GEMM_MAXIMA_INIT;
  maxima.m = problem.m, maxima.n = problem.n, maxima.k = problem.k;
  maxima.dtype = problem.dtype, maxima.out_dtype = problem.out, maxima.comm_dtype = problem.comm;
  maxima.tuning = &tuning;
  const auto ask = problem.op == MK_OPERATOR_ALLGATHER_GEMM        ? mk_allgather_gemm_workspace_bytes
                   : problem.op == MK_OPERATOR_GEMM_REDUCE_SCATTER ? mk_gemm_reduce_scatter_workspace_bytes
                                                                   : mk_gemm_allreduce_workspace_bytes;
  size_t workspace = 0;
  require(ask(rank.comm, &maxima, &workspace), describe(problem, rank.nranks).c_str(), rank.comm);
  return static_cast<double>(sizes.total()) + static_cast<double>(workspace);
}

// The most that any rank needs, the least that any device has free a rank: the same answer everywhere.
struct Budget {
  std::vector<double> needed, free;
  explicit Budget(int nranks) : needed(nranks), free(nranks) {}
};

bool has_room(Rank& rank, const Problem& problem, Budget& budget, int ranks_per_device, const char* name) {
  size_t free = 0, total = 0;
  rank.meet();
  require_cuda(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
  budget.needed[rank.rank] = bytes_needed(rank, problem);
  budget.free[rank.rank] = static_cast<double>(free) / ranks_per_device;
  rank.meet();
  const double needed = *std::max_element(budget.needed.begin(), budget.needed.end());
  const double least = *std::min_element(budget.free.begin(), budget.free.end());
  const bool fits = needed + GIB < least;
  if (!fits && rank.rank == 0)
    tally.say(text("%s: skipped, a rank needs %.1f GiB and has %.1f", name, needed / GIB, least / GIB));
  rank.meet();
  return fits;
}

void run_large(Rank& rank, Watchdog& watchdog, const LargeCase& large, Budget& budget, int ranks_per_device) {
  const std::string name = std::string(large.name) + ": " + describe(large.problem, rank.nranks);
  watchdog.stage(rank.rank, name, 120, rank.comm);
  if (!has_room(rank, large.problem, budget, ranks_per_device, large.name)) return;
  const Bench bench(rank, large.problem);
  rank.meet();
  for (int launch = 0; launch < 2; ++launch) bench.launch(rank.stream, launch);
  rank.synchronize();
  const Wrong wrong = bench.verdict(rank.stream);
  tally.check(wrong.count == 0, text("rank %d: %s: %s", rank.rank, name.c_str(), describe(wrong).c_str()));
  rank.meet();
}

// Launches on the same matrices, back to back, prepared before.
void run_sweep(Rank& rank, Watchdog& watchdog, const std::string& name, const std::vector<Problem>& problems) {
  watchdog.stage(rank.rank, name, 120, rank.comm);
  Sizes sizes;
  for (const Problem& problem : problems) {
    sizes.cover(problem, rank.rank, rank.nranks);
    require(prepare(rank.comm, problem), describe(problem, rank.nranks).c_str(), rank.comm);
  }
  const Matrices matrices(sizes);
  const Judge judge;
  Leash leash(8);
  rank.meet();
  for (size_t i = 0; i < problems.size(); ++i) {
    checked_launch(rank.comm, problems[i], matrices.operands(problems[i], rank.rank, rank.nranks), judge,
                   static_cast<int>(i), rank.stream);
    if (i % 8 == 0) leash.mark(rank.stream);
  }
  rank.synchronize();
  const Wrong wrong = judge.verdict(rank.stream);
  tally.check(wrong.count == 0,
              text("rank %d: %s: %s: %s", rank.rank, name.c_str(),
                   describe(problems[wrong.label], rank.nranks).c_str(), describe(wrong).c_str()));
  rank.meet();
}

void run_sweeps(Rank& rank, Watchdog& watchdog) {
  for (const mk_operator_t op : ALL_OPERATORS) {
    std::vector<Problem> columns, inner, rows;
    for (int64_t n = 1; n <= 300; ++n) {
      // Types, layouts and heights change along; padding 0 puts the next row where this one ends.
      Problem problem{.op = op, .m = n % 3 == 0 ? 200 : 70, .n = n, .k = 40 + n % 5 * 8};
      problem.transposed = n % 2 == 1;
      problem.out = n % 4 == 3 ? MK_DTYPE_FP32 : MK_DTYPE_BF16;
      problem.bias = n % 5 == 0, problem.accumulate = n % 7 == 0, problem.gathered = n % 3 == 1;
      problem.padding = n % 11 == 0 ? 0 : 8;
      columns.push_back(problem);
    }
    for (int64_t k = 0; k <= 8; ++k) {
      for (const int64_t m : {5, 200, 1000}) {
        inner.push_back({.op = op, .m = m, .n = 264, .k = k, .bias = k % 2 == 0, .gathered = true});
        inner.push_back(
            {.op = op, .m = m, .n = 136, .k = k, .transposed = true, .out = MK_DTYPE_FP32, .accumulate = true});
      }
    }
    for (int64_t m = 0; m <= 2 * rank.nranks + 1; ++m) {
      rows.push_back({.op = op, .m = m, .n = 264, .k = 136, .gathered = true});
      rows.push_back({.op = op, .m = m, .n = 1000, .k = 520, .transposed = true, .bias = true});
      rows.push_back({.op = op, .m = m, .n = 0, .k = 64});
    }
    const char* names[] = {"", "AG+GEMM", "GEMM+RS", "GEMM+AR"};
    run_sweep(rank, watchdog, text("%s, 1 to 300 columns", names[op]), columns);
    run_sweep(rank, watchdog, text("%s, short inner dimensions", names[op]), inner);
    run_sweep(rank, watchdog, text("%s, few rows", names[op]), rows);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const Options options = start(argc, argv);
  const int num_devices = require_devices();
  Watchdog watchdog(tally, options.nranks);
  Budget budget(options.nranks);
  run_ranks(options.nranks, [&](Rank& rank) {
    load_pattern_kernels(rank.stream);
    rank.meet();
    run_sweeps(rank, watchdog);
    const int ranks_per_device = (rank.nranks + num_devices - 1) / num_devices;
    for (const LargeCase& large : large_cases()) {
      if (large.is_quick || !options.quick) run_large(rank, watchdog, large, budget, ranks_per_device);
    }
    watchdog.stage(rank.rank, "leaving", 60, rank.comm);
  });
  return tally.finish();
}
