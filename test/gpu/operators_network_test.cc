// SPDX-License-Identifier: MIT
// The GEMM operators between emulated nodes on GPUs, over rc and srd (emulated NICs, calm and nasty) and over
// ofi: every launch on new operands and checked in full; tails, few rows, nothing to send; weight gradients;
// replays of a captured launch; many launches in a row; the same bits from every launch; what is not built
// between nodes is refused, and the communicator goes on.
//
//   operators_network_test [--ranks N] [--quick]      MK_TEST_TRANSPORT=rc: over this one alone
#include "network_transports.h"

namespace {

using namespace operators;

Tally tally;

std::vector<Problem> problems(bool quick) {
  constexpr mk_operator_t AG = MK_OPERATOR_ALLGATHER_GEMM;
  constexpr mk_operator_t RS = MK_OPERATOR_GEMM_REDUCE_SCATTER;
  constexpr mk_operator_t AR = MK_OPERATOR_GEMM_ALLREDUCE;
  std::vector<Problem> all = {
      {.op = AG, .m = 1024, .n = 520, .k = 776},
      {.op = AG, .m = 100, .n = 264, .k = 72, .gathered = true},
      {.op = AG,
       .m = 2500,
       .n = 1031,
       .k = 1000,
       .transposed = true,
       .dtype = MK_DTYPE_FP16,
       .out = MK_DTYPE_FP32,
       .accumulate = true,
       .bias = true,
       .gathered = true},
      {.op = AG, .m = 0, .n = 64, .k = 64},
      {.op = AG, .m = 700, .n = 64, .k = 0},
      {.op = AG, .m = 3, .n = 24, .k = 8},
      {.op = AG, .m = 8192, .n = 2048, .k = 2048},
      {.op = AG, .m = 1024, .n = 520, .k = 776, .wgrad = true},
      {.op = AG, .m = 100, .n = 264, .k = 72, .gathered = true, .wgrad = true},
      {.op = AG,
       .m = 2500,
       .n = 1031,
       .k = 1000,
       .transposed = true,
       .dtype = MK_DTYPE_FP16,
       .out = MK_DTYPE_FP32,
       .accumulate = true,
       .gathered = true,
       .k_less = 24,
       .wgrad = true},
      {.op = AG, .m = 0, .n = 64, .k = 64, .wgrad = true},
      {.op = AG, .m = 700, .n = 0, .k = 64, .wgrad = true},
      {.op = AG, .m = 700, .n = 64, .k = 24, .gathered = true, .k_less = 24, .wgrad = true},
      {.op = AG, .m = 3, .n = 24, .k = 8, .gathered = true, .wgrad = true},
      {.op = AG, .m = 8192, .n = 2048, .k = 2048, .wgrad = true},
      {.op = RS, .m = 1024, .n = 520, .k = 776},
      {.op = RS, .m = 100, .n = 264, .k = 72},
      {.op = RS,
       .m = 2500,
       .n = 1031,
       .k = 1000,
       .transposed = true,
       .dtype = MK_DTYPE_FP16,
       .out = MK_DTYPE_FP32,
       .accumulate = true,
       .bias = true},
      {.op = RS, .m = 0, .n = 64, .k = 64},
      {.op = RS, .m = 700, .n = 64, .k = 0},
      {.op = RS, .m = 3, .n = 24, .k = 8},
      {.op = RS, .m = 4096, .n = 4096, .k = 1024},
      {.op = AR, .m = 1024, .n = 520, .k = 776},
      {.op = AR, .m = 100, .n = 264, .k = 72, .bias = true},
      {.op = AR,
       .m = 2500,
       .n = 1031,
       .k = 1000,
       .transposed = true,
       .dtype = MK_DTYPE_FP16,
       .out = MK_DTYPE_FP32,
       .accumulate = true,
       .bias = true},
      {.op = AR, .m = 0, .n = 64, .k = 64},
      {.op = AR, .m = 700, .n = 64, .k = 0},
      {.op = AR, .m = 3, .n = 24, .k = 8},
      {.op = AR, .m = 4096, .n = 4096, .k = 1024},
  };
  if (!quick) {
    all.push_back({.op = AG, .m = 1, .n = 128, .k = 64, .gathered = true});
    all.push_back({.op = AG, .m = 700, .n = 0, .k = 64, .gathered = true});
    all.push_back({.op = AG, .m = 4096, .n = 264, .k = 4096, .gathered = true});
    all.push_back({.op = AG, .m = 16384, .n = 4096, .k = 4096});
    all.push_back({.op = AG, .m = 1, .n = 128, .k = 64, .gathered = true, .wgrad = true});
    all.push_back({.op = AG, .m = 4099, .n = 1300, .k = 900, .transposed = true, .wgrad = true});
    all.push_back({.op = AG, .m = 16384, .n = 4096, .k = 4096, .out = MK_DTYPE_FP32, .wgrad = true});
    all.push_back({.op = RS, .m = 700, .n = 0, .k = 64});
    all.push_back({.op = RS, .m = 16384, .n = 8192, .k = 1024});
    all.push_back({.op = RS, .m = 1000, .n = 520, .k = 776, .comm = MK_DTYPE_FP32});
    all.push_back({.op = AR, .m = 700, .n = 0, .k = 64});
    all.push_back({.op = AR, .m = 8192, .n = 8192, .k = 1024});
    all.push_back({.op = AR, .m = 1000, .n = 520, .k = 776, .comm = MK_DTYPE_FP32, .accumulate = true});
  }
  return all;
}

void check_verdict(const Rank& rank, const Wrong& wrong, const std::string& what) {
  tally.check(wrong.count == 0, text("rank %d: %s: launch %d: %s", rank.rank, what.c_str(), wrong.label,
                                     describe(wrong).c_str()));
}

// One after the other, the host waiting for each; then in a row.
void run_problem(Rank& rank, Watchdog& watchdog, const Problem& problem, const std::string& where,
                 int in_a_row) {
  const std::string what = where + ": " + describe(problem, rank.nranks);
  watchdog.stage(rank.rank, what, 60, rank.comm);
  const Bench bench(rank, problem);
  Leash leash(8);
  rank.meet();
  for (int launch = 0; launch < 3; ++launch) {
    bench.launch(rank.stream, launch);
    rank.synchronize();
    check_verdict(rank, bench.verdict(rank.stream), what);
    rank.meet();
  }
  for (int launch = 0; launch < in_a_row; ++launch) {
    bench.launch(rank.stream, launch);
    leash.mark(rank.stream);
  }
  rank.synchronize();
  check_verdict(rank, bench.verdict(rank.stream), what + ", in a row");
  rank.meet();
}

void run_captured(Rank& rank, Watchdog& watchdog, const Problem& problem, const std::string& where,
                  int replays) {
  const std::string what = where + ": captured: " + describe(problem, rank.nranks);
  watchdog.stage(rank.rank, what, 60, rank.comm);
  const Bench bench(rank, problem);
  rank.meet();
  const Replay replay(rank.stream, [&] { bench.launch(rank.stream); });
  rank.meet();
  Leash leash(8);
  for (int i = 0; i < replays; ++i) {
    replay.launch();
    leash.mark(rank.stream);
  }
  rank.synchronize();
  check_verdict(rank, bench.verdict(rank.stream), what);
  rank.meet();
}

// Weight gradients of real numbers, whose bits show the order in which rows are summed.
void run_same_bits(Rank& rank, Watchdog& watchdog, const std::string& where, int launches) {
  const Problem problem = {
      .op = MK_OPERATOR_ALLGATHER_GEMM, .m = 3000, .n = 1032, .k = 1000, .out = MK_DTYPE_FP32, .wgrad = true};
  const std::string what = where + ": the same bits: " + describe(problem, rank.nranks);
  watchdog.stage(rank.rank, what, 60, rank.comm);
  const Bench bench(rank, problem);
  const Operands& operands = bench.operands();
  const Buffer first(static_cast<size_t>(operands.c_rows * operands.ldc) * 4);
  fill_operands(operands, Filling::random, bench.judge().turn(), rank.stream);
  rank.synchronize();
  for (int launch = 0; launch < launches; ++launch) {
    rank.meet();
    require(bench.call(rank.stream), what.c_str(), rank.comm);
    rank.synchronize();
    rank.meet();
    if (launch == 0) {
      require_cuda(cudaMemcpyAsync(first.data, operands.c, first.bytes, cudaMemcpyDeviceToDevice, rank.stream),
                   "cudaMemcpyAsync");
    } else {
      check_equal_bits(first.data, operands.c, first.bytes, launch, bench.judge().wrong(), rank.stream);
    }
    rank.synchronize();
  }
  check_verdict(rank, bench.verdict(rank.stream), what);
  rank.meet();
}

// Refused before anything happens, by every rank.
void run_refused(Rank& rank, Watchdog& watchdog, const std::string& where) {
  watchdog.stage(rank.rank, where + ": refused", 30, rank.comm);
  const auto check = [&](const char* name, mk_status_t status) {
    tally.check(status == MK_ERROR_UNSUPPORTED && std::strstr(mk_get_last_error(rank.comm), "between nodes"),
                text("rank %d: %s: %s gave %s: %s", rank.rank, where.c_str(), name, mk_status_string(status),
                     mk_get_last_error(rank.comm)));
  };
  mk_gemm_maxima_t gemm = MK_GEMM_MAXIMA_INIT;
  gemm.m = 512, gemm.n = 512, gemm.k = 512;
  gemm.dtype = gemm.out_dtype = MK_DTYPE_BF16;
  mk_tuning_t tuning = MK_TUNING_INIT;
  tuning.algorithm = MK_ALGORITHM_ONE_SHOT;
  gemm.tuning = &tuning;
  check("one-shot", mk_gemm_allreduce_prepare(rank.comm, &gemm));
  rank.meet();
}

void run_split(const Options& options, Watchdog& watchdog, const Transport& transport,
               const std::vector<int32_t>& nodes) {
  run_between_nodes(options.nranks, tally, transport, nodes, [&](Rank& rank, const std::string& where) {
    watchdog.stage(rank.rank, where + ": starting", 90, rank.comm);
    load_pattern_kernels(rank.stream);
    rank.meet();
    mk_comm_info_t info = MK_COMM_INFO_INIT;
    require(mk_comm_get_info(rank.comm, &info), "mk_comm_get_info", rank.comm);
    tally.check(
        std::strcmp(info.transport, transport.name) == 0 && info.num_nodes > 1,
        text("rank %d: %s: transport %s, %d nodes", rank.rank, where.c_str(), info.transport, info.num_nodes));
    for (const Problem& problem : problems(options.quick)) {
      const bool is_large = problem.m * std::max(problem.n, problem.k) > (int64_t{1} << 23);
      run_problem(rank, watchdog, problem, where, is_large ? 10 : options.quick ? 50 : 300);
    }
    run_refused(rank, watchdog, where);
    run_same_bits(rank, watchdog, where, options.quick ? 10 : 50);
    for (const mk_operator_t op :
         {MK_OPERATOR_ALLGATHER_GEMM, MK_OPERATOR_GEMM_REDUCE_SCATTER, MK_OPERATOR_GEMM_ALLREDUCE}) {
      const Problem problem = {
          .op = op, .m = 1500, .n = 520, .k = 776, .gathered = op == MK_OPERATOR_ALLGATHER_GEMM};
      run_captured(rank, watchdog, problem, where, options.quick ? 50 : 300);
    }
    const Problem gradient = {
        .op = MK_OPERATOR_ALLGATHER_GEMM, .m = 1500, .n = 520, .k = 776, .gathered = true, .wgrad = true};
    run_captured(rank, watchdog, gradient, where, options.quick ? 50 : 300);
    watchdog.stage(rank.rank, where + ": leaving", 60, rank.comm);
  });
}

}  // namespace

int main(int argc, char** argv) {
  const Options options = start(argc, argv);
  Watchdog watchdog(tally, options.nranks);
  const std::vector<Transport> all = transports(tally);
  if (all.empty()) return 77;
  for (const Transport& transport : all) {
    for (const auto& nodes : splits(options.nranks)) run_split(options, watchdog, transport, nodes);
  }
  return tally.finish();
}
