// SPDX-License-Identifier: MIT
// The GEMM operators between GPUs in CUDA graphs: a captured call is one kernel node; every replay, on operands
// that a kernel has changed since the last, is checked; several operators in a graph; replays among plain
// launches; graphs that outlive a growth of the workspace.
//
//   operators_capture_test [--ranks N] [--quick]
#include "operators_run.h"

namespace {

using namespace operators;

Tally tally;

// A graph of what `enqueue` does, uploaded; `nodes`: how many nodes it has to have, all of them kernels.
class Replay {
 public:
  template <class Enqueue>
  Replay(const Rank& rank, size_t nodes, const std::string& name, Enqueue&& enqueue) {
    require_cuda(cudaStreamBeginCapture(rank.stream, cudaStreamCaptureModeThreadLocal),
                 "cudaStreamBeginCapture");
    enqueue();
    cudaGraph_t graph = nullptr;
    require_cuda(cudaStreamEndCapture(rank.stream, &graph), "cudaStreamEndCapture");
    size_t count = 0;
    require_cuda(cudaGraphGetNodes(graph, nullptr, &count), "cudaGraphGetNodes");
    std::vector<cudaGraphNode_t> all(count);
    require_cuda(cudaGraphGetNodes(graph, all.data(), &count), "cudaGraphGetNodes");
    size_t kernels = 0;
    for (const cudaGraphNode_t node : all) {
      cudaGraphNodeType type = cudaGraphNodeTypeEmpty;
      require_cuda(cudaGraphNodeGetType(node, &type), "cudaGraphNodeGetType");
      kernels += type == cudaGraphNodeTypeKernel;
    }
    tally.check(count == nodes && kernels == nodes,
                text("rank %d: %s: captured %zu nodes, %zu of them kernels; expected %zu kernels", rank.rank,
                     name.c_str(), count, kernels, nodes));
    require_cuda(cudaGraphInstantiate(&replay_, graph, 0), "cudaGraphInstantiate");
    require_cuda(cudaGraphDestroy(graph), "cudaGraphDestroy");
    require_cuda(cudaGraphUpload(replay_, rank.stream), "cudaGraphUpload");
    require_cuda(cudaStreamSynchronize(rank.stream), "cudaGraphUpload");
  }
  ~Replay() { cudaGraphExecDestroy(replay_); }
  Replay(const Replay&) = delete;
  Replay& operator=(const Replay&) = delete;
  void launch(cudaStream_t stream) const { require_cuda(cudaGraphLaunch(replay_, stream), "cudaGraphLaunch"); }

 private:
  cudaGraphExec_t replay_ = nullptr;
};

void check_verdict(const Rank& rank, const Judge& judge, const std::string& name) {
  rank.synchronize();
  const Wrong wrong = judge.verdict(rank.stream);
  tally.check(wrong.count == 0, text("rank %d: %s: turn %d of the graph: %s", rank.rank, name.c_str(),
                                     wrong.label, describe(wrong).c_str()));
}

uint64_t epoch_of(const Rank& rank) {
  mk_comm_info_t info = MK_COMM_INFO_INIT;
  require(mk_comm_get_info(rank.comm, &info), "mk_comm_get_info", rank.comm);
  return info.epoch;
}

// The flight record of launches that have ended, replays among them.
void check_record(const Rank& rank, const std::string& name) {
  std::vector<mk_flight_entry_t> flights(8);
  size_t count = 0;
  require(mk_comm_get_flight_record(rank.comm, flights.data(), flights.size(), &count),
          "mk_comm_get_flight_record", rank.comm);
  bool is_right = count == flights.size();
  for (size_t i = 0; is_right && i < count; ++i) {
    is_right = flights[i].state == 2 && flights[i].epoch == flights[0].epoch + i &&
               flights[i].duration_us > 0 &&
               (i == 0 || flights[i].start_us >= flights[i - 1].start_us + flights[i - 1].duration_us);
  }
  is_right = is_right && flights.back().epoch == epoch_of(rank);
  tally.check(is_right,
              text("rank %d: %s: the last launches are not all in the flight record, completed one after the "
                   "other",
                   rank.rank, name.c_str()));
}

// Replays only, then replays and plain launches in turn.
void run_single(Rank& rank, Watchdog& watchdog, const Problem& problem, int replays) {
  const std::string name = describe(problem, rank.nranks);
  watchdog.stage(rank.rank, name, 90, rank.comm);
  Sizes sizes;
  sizes.cover(problem, rank.rank, rank.nranks);
  const Matrices captured(sizes), plain(sizes);
  const Operands operands = captured.operands(problem, rank.rank, rank.nranks);
  const Operands plain_operands = plain.operands(problem, rank.rank, rank.nranks);
  const Judge judge;
  Leash leash(8);
  require(prepare(rank.comm, problem), name.c_str(), rank.comm);
  rank.meet();
  const Replay replay(rank, 1, name, [&] {
    require(call(rank.comm, problem, operands, rank.stream), name.c_str(), rank.comm);
  });
  const uint64_t epoch = epoch_of(rank);
  rank.meet();
  for (int turn = 0; turn < replays; ++turn) {
    const bool is_plain = turn >= replays * 3 / 4 && turn % 2 == 0;
    if (turn % 32 == rank.rank) stall(40, rank.stream);
    if (is_plain) {
      checked_launch(rank.comm, problem, plain_operands, judge, turn, rank.stream);
    } else {
      next_turn(judge.turn(), rank.stream);
      fill_operands(operands, Filling::pattern, judge.turn(), rank.stream);
      replay.launch(rank.stream);
      check_results(operands, judge.turn(), turn, judge.wrong(), rank.stream);
    }
    if (turn % 8 == 0) leash.mark(rank.stream);
  }
  check_verdict(rank, judge, name);
  if (rank.nranks == 1) return;  // whose replays nobody counts
  tally.check(epoch_of(rank) - epoch == static_cast<uint64_t>(replays),
              text("rank %d: %s: %d replays and launches, but the epoch grew by %llu", rank.rank, name.c_str(),
                   replays, static_cast<unsigned long long>(epoch_of(rank) - epoch)));
  check_record(rank, name);
  rank.meet();
}

// Three operators in a graph, and then all of a turn, operands and checks included. Between the two a larger
// workspace is prepared.
void run_several(Rank& rank, Watchdog& watchdog, int replays) {
  watchdog.stage(rank.rank, "three operators in a graph", 120, rank.comm);
  const Problem problems[] = {
      {.op = MK_OPERATOR_ALLGATHER_GEMM, .m = 300, .n = 264, .k = 328},
      {.op = MK_OPERATOR_GEMM_REDUCE_SCATTER, .m = 700, .n = 136, .k = 200, .bias = true},
      {.op = MK_OPERATOR_GEMM_ALLREDUCE, .m = 64, .n = 520, .k = 136}};
  Sizes sizes;
  for (const Problem& problem : problems) sizes.cover(problem, rank.rank, rank.nranks);
  const Matrices matrices[] = {Matrices(sizes), Matrices(sizes), Matrices(sizes)};
  const Judge judge;
  Leash leash(8);
  Operands operands[3];
  for (int i = 0; i < 3; ++i) {
    operands[i] = matrices[i].operands(problems[i], rank.rank, rank.nranks);
    require(prepare(rank.comm, problems[i]), "prepare", rank.comm);
  }
  const auto fill_all = [&] {
    next_turn(judge.turn(), rank.stream);
    for (const Operands& to : operands) fill_operands(to, Filling::pattern, judge.turn(), rank.stream);
  };
  const auto call_all = [&] {
    for (int i = 0; i < 3; ++i)
      require(call(rank.comm, problems[i], operands[i], rank.stream), "three operators in a graph", rank.comm);
  };
  const auto check_all = [&](int label) {
    for (const Operands& of : operands) check_results(of, judge.turn(), label, judge.wrong(), rank.stream);
  };
  rank.meet();
  const Replay three(rank, 3, "three operators", call_all);
  const Replay whole(rank, 10, "a whole turn", [&] {
    fill_all();
    call_all();
    check_all(-1);
  });
  for (const bool has_grown : {false, true}) {
    if (has_grown) {
      const Problem larger = {.op = MK_OPERATOR_ALLGATHER_GEMM, .m = 8192, .n = 64, .k = 2048};
      require(prepare(rank.comm, larger), "prepare", rank.comm);
    }
    rank.meet();
    for (int turn = 0; turn < replays; ++turn) {
      fill_all();
      three.launch(rank.stream);
      check_all(turn);
      if (turn % 4 == 0) leash.mark(rank.stream);
    }
    for (int turn = 0; turn < replays; ++turn) {
      if (turn % 16 == rank.rank) stall(40, rank.stream);
      whole.launch(rank.stream);
      if (turn % 4 == 0) leash.mark(rank.stream);
    }
    check_verdict(rank, judge, has_grown ? "graphs after a growth" : "three operators in a graph");
  }
  rank.meet();
}

// Refused while capturing, which goes on being valid.
void run_unprepared(Rank& rank, Watchdog& watchdog) {
  const Problem problem = {.op = MK_OPERATOR_GEMM_REDUCE_SCATTER, .m = 4096, .n = 2056, .k = 64};
  watchdog.stage(rank.rank, "an unprepared call under capture", 60, rank.comm);
  Sizes sizes;
  sizes.cover(problem, rank.rank, rank.nranks);
  const Matrices matrices(sizes);
  const Operands operands = matrices.operands(problem, rank.rank, rank.nranks);
  rank.meet();
  mk_status_t status = MK_SUCCESS;
  const Replay nothing(rank, 0, "an unprepared call",
                       [&] { status = call(rank.comm, problem, operands, rank.stream); });
  tally.check(status == MK_ERROR_NOT_PREPARED && *mk_get_last_error(rank.comm) != '\0',
              text("rank %d: an unprepared call under capture: %s: %s", rank.rank, mk_status_string(status),
                   mk_get_last_error(rank.comm)));
  rank.meet();
}

}  // namespace

int main(int argc, char** argv) {
  const Options options = start(argc, argv);
  Watchdog watchdog(tally, options.nranks);
  run_ranks(options.nranks, [&](Rank& rank) {
    load_pattern_kernels(rank.stream);
    rank.meet();
    const int replays = options.quick ? 200 : 1000;
    if (rank.nranks > 1) run_unprepared(rank, watchdog);
    const Problem problems[] = {
        {.op = MK_OPERATOR_ALLGATHER_GEMM,
         .m = 512,
         .n = 520,
         .k = 328,
         .bias = true,
         .gathered = rank.nranks > 1},
        {.op = MK_OPERATOR_ALLGATHER_GEMM, .m = 16, .n = 264, .k = 512},
        {.op = MK_OPERATOR_GEMM_REDUCE_SCATTER, .m = 1000, .n = 264, .k = 136, .out = MK_DTYPE_FP32},
        {.op = MK_OPERATOR_GEMM_ALLREDUCE, .m = 16, .n = 512, .k = 264, .algorithm = MK_ALGORITHM_ONE_SHOT},
        {.op = MK_OPERATOR_GEMM_ALLREDUCE, .m = 600, .n = 264, .k = 136, .algorithm = MK_ALGORITHM_TWO_SHOT}};
    for (const Problem& problem : problems) run_single(rank, watchdog, problem, replays);
    run_several(rank, watchdog, options.quick ? 50 : 200);
    watchdog.stage(rank.rank, "leaving", 60, rank.comm);
  });
  return tally.finish();
}
