// SPDX-License-Identifier: MIT
// Outputs in symmetric memory: right, and nothing written beside them, wherever the ranks have placed theirs;
// written by the peers themselves where all have placed them alike, as a trace's missing copies show; never
// before their owner's earlier work has left them, also in replays of a graph.
//
//   operators_outputs_test [--ranks N] [--quick]
#include <fstream>

#include "operators_run.h"

namespace {

using namespace operators;

Tally tally;

enum class Placing {
  alike,
  apart,          // every other rank in another allocation
  one_elsewhere,  // the last rank's is not in symmetric memory
};
const char* name_of(Placing placing) {
  return placing == Placing::alike ? "alike" : placing == Placing::apart ? "apart" : "one elsewhere";
}

// The same two pieces of symmetric memory on every rank.
class SymmetricPair {
 public:
  SymmetricPair(mk_comm_t comm, size_t bytes) : comm_(comm) {
    for (void*& piece : pieces_) require(mk_mem_alloc(comm, bytes, &piece), "mk_mem_alloc", comm);
  }
  ~SymmetricPair() {
    for (void* piece : pieces_) require(mk_mem_free(comm_, piece), "mk_mem_free", comm_);
  }
  SymmetricPair(const SymmetricPair&) = delete;
  SymmetricPair& operator=(const SymmetricPair&) = delete;
  void* piece(int which) const { return pieces_[which]; }

 private:
  const mk_comm_t comm_;
  void* pieces_[2] = {};
};

// A problem whose output, the gathered A or C, is where `placing` says.
class Placed {
 public:
  Placed(const Rank& rank, const Problem& problem, Placing placing)
      : problem_(problem),
        comm_(rank.comm),
        sizes_(sizes_of(problem, rank)),
        matrices_(sizes_),
        symmetric_(rank.comm, gathers() ? sizes_.gathered : sizes_.c),
        operands_(matrices_.operands(problem, rank.rank, rank.nranks)) {
    if (placing != Placing::one_elsewhere || rank.rank < rank.nranks - 1) {
      void* const output = symmetric_.piece(placing == Placing::apart ? rank.rank % 2 : 0);
      (gathers() ? operands_.gathered : operands_.c) = output;
    }
    require(prepare(comm_, problem), describe(problem, rank.nranks).c_str(), comm_);
  }

  // A launch on new operands; `slow_us`: how long the check of its results is put off.
  void launch(cudaStream_t stream, int label, int slow_us = 0) const {
    next_turn(judge_.turn(), stream);
    fill_operands(operands_, Filling::pattern, judge_.turn(), stream);
    require(call(comm_, problem_, operands_, stream), describe(problem_, operands_.nranks).c_str(), comm_);
    if (slow_us > 0) stall(slow_us, stream);
    check_results(operands_, judge_.turn(), label, judge_.wrong(), stream);
  }
  Wrong verdict(cudaStream_t stream) const { return judge_.verdict(stream); }

 private:
  static Sizes sizes_of(const Problem& problem, const Rank& rank) {
    Sizes sizes;
    sizes.cover(problem, rank.rank, rank.nranks);
    return sizes;
  }
  bool gathers() const { return problem_.op == MK_OPERATOR_ALLGATHER_GEMM; }

  const Problem problem_;
  const mk_comm_t comm_;
  const Sizes sizes_;
  const Matrices matrices_;
  const SymmetricPair symmetric_;
  Operands operands_;
  const Judge judge_;
};

void check_verdict(const Rank& rank, const Placed& placed, const std::string& what) {
  const Wrong wrong = placed.verdict(rank.stream);
  tally.check(wrong.count == 0, text("rank %d: %s: %s", rank.rank, what.c_str(), describe(wrong).c_str()));
}

// Spans of copying from or to a certain rank, in the trace of a launch: what peers have not brought to its
// place is copied there.
int num_copies(Rank& rank, const Placed& placed) {
  char path[] = "/tmp/operators_outputs_test_XXXXXX";
  const int file = mkstemp(path);
  tally.check(file >= 0, "a file for the trace");
  close(file);
  require(mk_trace_start(rank.comm, nullptr), "mk_trace_start", rank.comm);
  rank.meet();  // on a shared GPU nothing of the test's runs beside the operators
  placed.launch(rank.stream, 0);
  rank.synchronize();
  require(mk_trace_stop(rank.comm, path), "mk_trace_stop", rank.comm);
  rank.meet();
  int count = 0;
  std::ifstream lines(path);
  const auto has = [](const std::string& line, const char* words) {
    return line.find(words) != std::string::npos;
  };
  for (std::string line; std::getline(lines, line);)
    count += has(line, "\"name\":\"copy\"") && has(line, "\"peer\":");
  unlink(path);
  return count;
}

// `is_direct`: can be written by peers, if all place it alike.
void run_placings(Rank& rank, Watchdog& watchdog, const Problem& problem, bool is_direct) {
  const std::string name = describe(problem, rank.nranks);
  watchdog.stage(rank.rank, name, 60, rank.comm);
  int copies[3] = {};
  for (const Placing placing : {Placing::alike, Placing::apart, Placing::one_elsewhere}) {
    const Placed placed(rank, problem, placing);
    copies[static_cast<int>(placing)] = num_copies(rank, placed);
    check_verdict(rank, placed, name + ", outputs " + name_of(placing));
    rank.meet();
  }
  // Warps of a consumer warpgroup share a row of the trace, on which one of them is seen.
  const auto are_alike = [&](int a, int b) { return 2 * copies[a] >= copies[b] && 2 * copies[b] >= copies[a]; };
  tally.check(are_alike(1, 2) && (is_direct ? copies[0] < std::min(copies[1], copies[2]) : are_alike(0, 1)),
              text("rank %d: %s: %d, %d and %d copies, where the outputs %s written by peers", rank.rank,
                   name.c_str(), copies[0], copies[1], copies[2], is_direct ? "are" : "are not"));
}

// Ranks go on without waiting for each other's checks of what the last launch has written.
void run_ahead(Rank& rank, Watchdog& watchdog, const Problem& problem, int turns) {
  const std::string name = describe(problem, rank.nranks) + ", one launch after the other";
  watchdog.stage(rank.rank, name, 60, rank.comm);
  const Placed placed(rank, problem, Placing::alike);
  Leash leash(8);
  rank.meet();
  for (int turn = 0; turn < turns; ++turn) {
    placed.launch(rank.stream, turn, (turn + rank.rank) % 3 == 0 ? 500 : 0);
    leash.mark(rank.stream);
  }
  rank.synchronize();
  check_verdict(rank, placed, name);
  rank.meet();
}

void run_captured(Rank& rank, Watchdog& watchdog, const Problem& problem, int replays) {
  const std::string name = describe(problem, rank.nranks) + ", replayed";
  watchdog.stage(rank.rank, name, 60, rank.comm);
  const Placed placed(rank, problem, Placing::alike);
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t replay = nullptr;
  require_cuda(cudaStreamBeginCapture(rank.stream, cudaStreamCaptureModeThreadLocal), "capture begins");
  placed.launch(rank.stream, 0);
  require_cuda(cudaStreamEndCapture(rank.stream, &graph), "capture ends");
  require_cuda(cudaGraphInstantiate(&replay, graph, 0), "cudaGraphInstantiate");
  for (int i = 0; i < replays; ++i) {
    rank.meet();
    require_cuda(cudaGraphLaunch(replay, rank.stream), "cudaGraphLaunch");
    rank.synchronize();
  }
  check_verdict(rank, placed, name);
  rank.meet();
  cudaGraphExecDestroy(replay);
  cudaGraphDestroy(graph);
}

Problem gather(int64_t m, int64_t n, int64_t k) {
  return {.op = MK_OPERATOR_ALLGATHER_GEMM, .m = m, .n = n, .k = k, .gathered = true};
}
Problem reduce(int64_t m, int64_t n, int64_t k) {
  return {.op = MK_OPERATOR_GEMM_ALLREDUCE, .m = m, .n = n, .k = k, .algorithm = MK_ALGORITHM_TWO_SHOT};
}
// The same, of an output that is too wide for tagged packets, however small.
Problem reduce_wide(int64_t m, int64_t n, int64_t k) {
  Problem problem = reduce(m, n, k);
  problem.out = MK_DTYPE_FP32;
  return problem;
}

void run_all_placings(Rank& rank, Watchdog& watchdog) {
  run_placings(rank, watchdog, gather(1000, 520, 328), true);
  run_placings(rank, watchdog, gather(16, 512, 512), true);  // tiles of several ranks' rows
  run_placings(rank, watchdog, gather(4096, 4096, 512), true);
  run_placings(rank, watchdog, gather(700, 0, 256), true);
  run_placings(rank, watchdog, gather(777, 1031, 77), false);  // rows end within 16 bytes
  run_placings(rank, watchdog, reduce_wide(1000, 520, 328), true);
  run_placings(rank, watchdog, reduce(4096, 1024, 256), true);
  run_placings(rank, watchdog, reduce_wide(9, 64, 72), true);
  run_placings(rank, watchdog, reduce(400, 8192, 328), true);  // swapped tiles, where clusters run
  run_placings(rank, watchdog, reduce(120, 520, 328), false);  // tagged packets are brought by their readers
  run_placings(rank, watchdog, reduce(9, 64, 72), false);
  run_placings(rank, watchdog, reduce(700, 333, 72), false);
  Problem problem = reduce_wide(1000, 516, 200);
  problem.bias = true, problem.transposed = true;
  run_placings(rank, watchdog, problem, true);
  problem.accumulate = true;  // each rank adds to its own
  run_placings(rank, watchdog, problem, false);
  problem = reduce(16, 520, 328);
  problem.algorithm = MK_ALGORITHM_ONE_SHOT;
  run_placings(rank, watchdog, problem, false);
}

}  // namespace

int main(int argc, char** argv) {
  const Options options = start(argc, argv);
  if (options.nranks < 2) {
    std::printf("skipped: one rank has no peers\n");
    return 77;
  }
  const bool shares = options.nranks > require_devices();
  Watchdog watchdog(tally, options.nranks);
  run_ranks(options.nranks, [&](Rank& rank) {
    load_pattern_kernels(rank.stream);
    rank.meet();
    run_all_placings(rank, watchdog);
    for (const Problem& problem :
         {gather(1000, 520, 328), gather(16, 512, 512), reduce(1000, 520, 328), reduce_wide(1000, 520, 328)}) {
      // The stalls and checks of one rank would hold up the kernels of another on the same GPU.
      if (!shares) run_ahead(rank, watchdog, problem, options.quick ? 50 : 500);
      run_captured(rank, watchdog, problem, options.quick ? 10 : 50);
    }
    watchdog.stage(rank.rank, "leaving", 60, rank.comm);
  });
  return tally.finish();
}
