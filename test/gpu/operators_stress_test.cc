// SPDX-License-Identifier: MIT
// The GEMM operators between GPUs, launched back to back without the host in between: 10,000 launches of mixed
// operators and shapes on operands that are new each time, each checked to the last bit; the same bits from 200
// runs; the sum over ranks against the ordered sum of the partial products.
//
//   operators_stress_test [--ranks N] [--nodes N] [--quick]      MK_TRANSPORT=srd MK_VERBS_LIBRARY=… between
//   nodes
#include "operators_run.h"

namespace {

using namespace operators;

Tally tally;
int num_nodes = 1;

bool is_built(const Problem& problem) { return num_nodes == 1 || problem.algorithm != MK_ALGORITHM_ONE_SHOT; }

std::vector<Problem> mixed_problems() {
  constexpr auto gather = MK_OPERATOR_ALLGATHER_GEMM;
  constexpr auto scatter = MK_OPERATOR_GEMM_REDUCE_SCATTER;
  constexpr auto reduce = MK_OPERATOR_GEMM_ALLREDUCE;
  constexpr auto fp16 = MK_DTYPE_FP16, fp32 = MK_DTYPE_FP32;
  std::vector<Problem> all = {
      {.op = gather, .m = 512, .n = 512, .k = 256},
      {.op = gather, .m = 1000, .n = 520, .k = 328, .bias = true},
      {.op = gather,
       .m = 130,
       .n = 264,
       .k = 72,
       .transposed = true,
       .dtype = fp16,
       .out = fp32,
       .accumulate = true,
       .gathered = true},
      {.op = gather, .m = 16, .n = 512, .k = 520, .gathered = true},
      {.op = gather, .m = 1, .n = 129, .k = 64, .transposed = true},
      {.op = gather, .m = 1700, .n = 96, .k = 776, .gathered = true},
      {.op = scatter, .m = 512, .n = 512, .k = 256},
      {.op = scatter, .m = 1000, .n = 520, .k = 328, .transposed = true, .bias = true},
      {.op = scatter, .m = 300, .n = 137, .k = 72, .out = fp32, .accumulate = true, .k_less = 8},
      {.op = scatter, .m = 3, .n = 24, .k = 8, .dtype = fp16, .out = fp16},
      {.op = scatter, .m = 130, .n = 264, .k = 1000, .out = fp32, .comm = fp32},
      {.op = scatter, .m = 16, .n = 2048, .k = 512, .transposed = true},
      {.op = scatter, .m = 50, .n = 1000, .k = 136, .accumulate = true, .bias = true},
      {.op = reduce, .m = 16, .n = 512, .k = 512},
      {.op = reduce, .m = 64, .n = 1056, .k = 192, .bias = true, .algorithm = MK_ALGORITHM_ONE_SHOT},
      {.op = reduce, .m = 64, .n = 1056, .k = 192, .bias = true, .algorithm = MK_ALGORITHM_TWO_SHOT},
      {.op = reduce,
       .m = 300,
       .n = 264,
       .k = 136,
       .transposed = true,
       .accumulate = true,
       .algorithm = MK_ALGORITHM_TWO_SHOT,
       .k_less = 24},
      {.op = reduce, .m = 1000, .n = 520, .k = 328, .out = fp32, .algorithm = MK_ALGORITHM_TWO_SHOT},
      {.op = reduce, .m = 2, .n = 250, .k = 512, .dtype = fp16, .out = fp16, .accumulate = true},
  };
  std::erase_if(all, [](const Problem& problem) { return !is_built(problem); });
  return all;
}

// The same on all ranks.
uint32_t scrambled(uint32_t x) {
  x = (x ^ x >> 16) * 0x45d9f3bu;
  x = (x ^ x >> 16) * 0x45d9f3bu;
  return x ^ x >> 16;
}

void run_mixed(Rank& rank, Watchdog& watchdog, int launches) {
  watchdog.stage(rank.rank, "preparing mixed launches", 120, rank.comm);
  const std::vector<Problem> problems = mixed_problems();
  Sizes sizes;
  for (const Problem& problem : problems) sizes.cover(problem, rank.rank, rank.nranks);
  const Matrices one(sizes), other(sizes);  // pointers change, too
  const Judge judge;
  Leash leash(8);
  for (const Problem& problem : problems)
    require(prepare(rank.comm, problem), describe(problem, rank.nranks).c_str(), rank.comm);
  rank.meet();
  watchdog.stage(rank.rank, "mixed launches", 30 + launches / 50, rank.comm);
  for (int launch = 0; launch < launches; ++launch) {
    const int idx = static_cast<int>(scrambled(launch) % problems.size());
    const Operands operands = (launch % 2 == 0 ? one : other).operands(problems[idx], rank.rank, rank.nranks);
    // Ranks take turns in being late.
    if (launch % 16 == rank.rank) stall(static_cast<int>(scrambled(launch * 7) % 60), rank.stream);
    checked_launch(rank.comm, problems[idx], operands, judge, idx, rank.stream);
    if (launch % 8 == 0) leash.mark(rank.stream);
  }
  rank.synchronize();
  const Wrong wrong = judge.verdict(rank.stream);
  tally.check(wrong.count == 0,
              text("rank %d: %d mixed launches: %s: %s", rank.rank, launches,
                   describe(problems[wrong.label], rank.nranks).c_str(), describe(wrong).c_str()));
  mk_comm_info_t info = MK_COMM_INFO_INIT;
  require(mk_comm_get_info(rank.comm, &info), "mk_comm_get_info", rank.comm);
  tally.check(info.epoch == static_cast<uint64_t>(launches),
              text("rank %d: %d launches, but epoch %llu", rank.rank, launches,
                   static_cast<unsigned long long>(info.epoch)));
  rank.meet();
}

void run_same_bits(Rank& rank, Watchdog& watchdog, const Problem& problem, int runs) {
  watchdog.stage(rank.rank, "the same bits: " + describe(problem, rank.nranks), 60, rank.comm);
  Sizes sizes;
  sizes.cover(problem, rank.rank, rank.nranks);
  const Matrices matrices(sizes);
  const Operands operands = matrices.operands(problem, rank.rank, rank.nranks);
  const Buffer first(sizes.c);
  const Judge judge;
  Leash leash(8);
  require(prepare(rank.comm, problem), describe(problem, rank.nranks).c_str(), rank.comm);
  next_turn(judge.turn(), rank.stream);
  fill_operands(operands, Filling::random, judge.turn(), rank.stream);
  require_cuda(cudaStreamSynchronize(rank.stream), "filling");
  rank.meet();
  for (int run = 0; run <= runs; ++run) {
    require_cuda(cudaMemsetAsync(operands.c, 0xff, sizes.c, rank.stream), "cudaMemsetAsync");
    // Arrivals in another order each time.
    const uint32_t lateness = scrambled(run * 31 + rank.rank) % 4;
    if (lateness > 0) stall(static_cast<int>(lateness) * 15, rank.stream);
    require(call(rank.comm, problem, operands, rank.stream), describe(problem, rank.nranks).c_str(), rank.comm);
    if (run == 0) {
      require_cuda(cudaMemcpyAsync(first.data, operands.c, sizes.c, cudaMemcpyDeviceToDevice, rank.stream),
                   "cudaMemcpyAsync");
    }
    check_equal_bits(operands.c, first.data, sizes.c, run, judge.wrong(), rank.stream);
    if (run % 8 == 0) leash.mark(rank.stream);
  }
  rank.synchronize();
  const Wrong wrong = judge.verdict(rank.stream);
  tally.check(wrong.count == 0,
              text("rank %d: %s: run %d of %d differs from the first: %s", rank.rank,
                   describe(problem, rank.nranks).c_str(), wrong.label, runs, describe(wrong).c_str()));
  rank.meet();
}

// Does the plain product's plan add up each element in one piece, from k = 0 on, as the operators do? It may
// cut the inner dimension of tiles between CTAs when there are few; then there are more CTAs than tiles.
bool is_in_one_piece(const Rank& rank, const Problem& problem) {
  mk_gemm_allreduce_args_t args = MK_GEMM_ALLREDUCE_ARGS_INIT;
  args.m = problem.m, args.n = problem.n, args.k = problem.k;
  args.dtype = problem.dtype, args.out_dtype = problem.out;
  mk_plan_t plan = MK_PLAN_INIT;
  require(mk_gemm_allreduce_plan(rank.alone, &args, &plan), "mk_gemm_allreduce_plan", rank.alone);
  const int64_t tile_rows = (problem.m + plan.tile_m - 1) / plan.tile_m;
  return plan.compute_ctas <= tile_rows * ((problem.n + plan.tile_n - 1) / plan.tile_n);
}

// With `spread` inputs every product is exact in fp32 in any order, and the sum over ranks is not: it tests the
// order of ranks and the rounding whatever the plans are. Random inputs need plans that agree.
void run_ordered_sum(Rank& rank, Watchdog& watchdog, const Problem& problem, Filling filling,
                     std::vector<const float*>& partials) {
  const std::string name =
      describe(problem, rank.nranks) + (filling == Filling::random ? " random" : " spread");
  watchdog.stage(rank.rank, "the ordered sum: " + name, 60, rank.comm);
  Sizes sizes;
  sizes.cover(problem, rank.rank, rank.nranks);
  const Matrices matrices(sizes);
  const Operands operands = matrices.operands(problem, rank.rank, rank.nranks);
  const size_t elements = problem.m * problem.n;
  const Buffer partial(elements * 4), all_partials(elements * 4 * rank.nranks);
  const Judge judge;
  Problem product = problem;
  product.op = MK_OPERATOR_GEMM_ALLREDUCE, product.out = MK_DTYPE_FP32, product.comm = MK_DTYPE_FP32;
  product.algorithm = MK_ALGORITHM_AUTO;
  Operands alone = operands;
  alone.c = partial.data, alone.ldc = problem.n;
  require(prepare(rank.alone, product), "the plain product", rank.alone);
  require(prepare(rank.comm, problem), name.c_str(), rank.comm);
  if (filling == Filling::random &&
      !tally.check(is_in_one_piece(rank, product),
                   name + ": the plain product is cut along k: choose another shape"))
    return;
  partials[rank.rank] = static_cast<const float*>(partial.data);
  next_turn(judge.turn(), rank.stream);
  fill_operands(operands, filling, judge.turn(), rank.stream);
  require(call(rank.alone, product, alone, rank.stream), "the plain product", rank.alone);
  require_cuda(cudaStreamSynchronize(rank.stream), "the plain product");
  rank.meet();
  int num_devices = 0;
  require_cuda(cudaGetDeviceCount(&num_devices), "cudaGetDeviceCount");
  for (int source = 0; source < rank.nranks; ++source) {
    require_cuda(cudaMemcpyPeerAsync(static_cast<float*>(all_partials.data) + source * elements, rank.device,
                                     partials[source], source % num_devices, elements * 4, rank.stream),
                 "cudaMemcpyPeerAsync");
  }
  require_cuda(cudaStreamSynchronize(rank.stream), "copying partials");
  rank.meet();
  require(call(rank.comm, problem, operands, rank.stream), name.c_str(), rank.comm);
  const mk_dtype_t comm_dtype = problem.comm != MK_DTYPE_DEFAULT ? problem.comm
                                : problem.out == MK_DTYPE_FP32   ? problem.dtype
                                                                 : problem.out;
  check_ordered_sum(operands, static_cast<const float*>(all_partials.data), comm_dtype, 0, judge.wrong(),
                    rank.stream);
  rank.synchronize();
  const Wrong wrong = judge.verdict(rank.stream);
  tally.check(wrong.count == 0,
              text("rank %d: %s: not the ordered sum: %s", rank.rank, name.c_str(), describe(wrong).c_str()));
  rank.meet();
}

void run_sums(Rank& rank, Watchdog& watchdog, std::vector<const float*>& partials) {
  for (const Filling filling : {Filling::spread, Filling::random}) {
    for (const mk_dtype_t out : {MK_DTYPE_FP32, MK_DTYPE_BF16}) {
      for (const mk_dtype_t comm : {MK_DTYPE_BF16, MK_DTYPE_FP32}) {
        Problem problem{
            .op = MK_OPERATOR_GEMM_REDUCE_SCATTER, .m = 260, .n = 264, .k = 192, .out = out, .comm = comm};
        run_ordered_sum(rank, watchdog, problem, filling, partials);
        problem.op = MK_OPERATOR_GEMM_ALLREDUCE;
        for (const mk_algorithm_t algorithm : {MK_ALGORITHM_ONE_SHOT, MK_ALGORITHM_TWO_SHOT}) {
          problem.algorithm = algorithm;
          run_ordered_sum(rank, watchdog, problem, filling, partials);
        }
      }
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  const Options options = start(argc, argv);
  Watchdog watchdog(tally, options.nranks);
  std::vector<const float*> partials(options.nranks);
  num_nodes = options.nodes;
  std::vector<int32_t> node_of_rank;
  for (int rank = 0; rank < options.nranks; ++rank) node_of_rank.push_back(rank * num_nodes / options.nranks);
  const auto run = [&](Rank& rank) {
    load_pattern_kernels(rank.stream);
    rank.meet();
    run_mixed(rank, watchdog, options.quick ? 1000 : 10000);
    const int runs = options.quick ? 50 : 200;
    for (const int64_t m : {16, 1000}) {
      run_same_bits(rank, watchdog, {.op = MK_OPERATOR_ALLGATHER_GEMM, .m = m, .n = 520, .k = 776}, runs);
      run_same_bits(rank, watchdog, {.op = MK_OPERATOR_GEMM_REDUCE_SCATTER, .m = m, .n = 520, .k = 776}, runs);
      for (const mk_algorithm_t algorithm : {MK_ALGORITHM_ONE_SHOT, MK_ALGORITHM_TWO_SHOT}) {
        const Problem problem = {
            .op = MK_OPERATOR_GEMM_ALLREDUCE, .m = m, .n = 520, .k = 776, .algorithm = algorithm};
        if (is_built(problem)) run_same_bits(rank, watchdog, problem, runs);
      }
    }
    // Between nodes a node's sum is rounded before the nodes' are added.
    if (rank.nranks > 1 && num_nodes == 1) run_sums(rank, watchdog, partials);
    watchdog.stage(rank.rank, "leaving", 60, rank.comm);
  };
  run_ranks(options.nranks, run, [&](mk_comm_config_t& config) {
    if (num_nodes > 1) config.node_of_rank = node_of_rank.data();
  });
  return tally.finish();
}
