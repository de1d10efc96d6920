// SPDX-License-Identifier: MIT
// Operators beside other work on the same GPUs: an all-reduce of NCCL on another stream, a second communicator
// whose launches come in the opposite order, kernels that hold every SM for a while; and the host's time of a
// call.
//
//   operators_beside_test [--ranks N] [--quick] [--strict]      --strict: a call takes the host at most 5 us
#include <dlfcn.h>

#include "operators_run.h"

namespace {

using namespace operators;

Tally tally;

constexpr int RESERVED_SMS = 24;
constexpr double CALL_LIMIT_US = 5;

mk_unique_id_t shared_id;

mk_comm_t make_communicator(Rank& rank, int max_ctas) {
  if (rank.rank == 0) require(mk_get_unique_id(&shared_id), "mk_get_unique_id", nullptr);
  rank.meet();
  mk_comm_config_t config = MK_COMM_CONFIG_INIT;
  config.device = MK_DEVICE_CUDA;
  config.cuda_device = rank.device;
  config.max_ctas = max_ctas;
  mk_comm_t comm = nullptr;
  require(mk_comm_init(&comm, &shared_id, rank.nranks, rank.rank, &config), "mk_comm_init", comm);
  rank.meet();
  return comm;
}

cudaStream_t make_stream() {
  cudaStream_t stream = nullptr;
  require_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  return stream;
}

// What the test calls of NCCL's C interface, found at run time.
struct NcclId {
  char bytes[128];
};
class Nccl {
 public:
  using Comm = struct Opaque*;
  Nccl() : library_(dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL)) {
    if (library_ == nullptr) return;
    find("ncclGetUniqueId", get_unique_id_);
    find("ncclCommInitRank", init_rank_);
    find("ncclAllReduce", all_reduce_);
    find("ncclCommDestroy", destroy_);
  }
  bool present() const { return library_ != nullptr && complete_; }
  NcclId make_id() const {
    NcclId id{};
    require(get_unique_id_(&id), "ncclGetUniqueId");
    return id;
  }
  Comm join(int nranks, const NcclId& id, int rank) const {
    Comm comm = nullptr;
    require(init_rank_(&comm, nranks, id, rank), "ncclCommInitRank");
    return comm;
  }
  void all_reduce(float* data, size_t count, Comm comm, cudaStream_t stream) const {
    constexpr int FLOAT = 7, SUM = 0;
    require(all_reduce_(data, data, count, FLOAT, SUM, comm, stream), "ncclAllReduce");
  }
  void leave(Comm comm) const { destroy_(comm); }

 private:
  static void require(int result, const char* what) {
    if (result == 0) return;
    tally.check(false, text("%s: error %d of NCCL", what, result));
    tally.finish();
    std::_Exit(1);
  }
  template <class Function>
  void find(const char* name, Function& function) {
    function = reinterpret_cast<Function>(dlsym(library_, name));
    complete_ = complete_ && function != nullptr;
  }

  void* const library_;
  bool complete_ = true;
  int (*get_unique_id_)(NcclId*) = nullptr;
  int (*init_rank_)(Comm*, int, NcclId, int) = nullptr;
  int (*all_reduce_)(const void*, void*, size_t, int, int, Comm, cudaStream_t) = nullptr;
  int (*destroy_)(Comm) = nullptr;
};

struct Shared {
  Nccl nccl;
  NcclId nccl_id{};
};

std::vector<Problem> usual_problems() {
  return {{.op = MK_OPERATOR_ALLGATHER_GEMM, .m = 1000, .n = 520, .k = 328},
          {.op = MK_OPERATOR_GEMM_REDUCE_SCATTER, .m = 1000, .n = 520, .k = 328},
          {.op = MK_OPERATOR_GEMM_ALLREDUCE, .m = 1000, .n = 520, .k = 328, .algorithm = MK_ALGORITHM_TWO_SHOT},
          {.op = MK_OPERATOR_GEMM_ALLREDUCE, .m = 16, .n = 520, .k = 328}};
}

void check_verdict(const Rank& rank, const Bench& bench, cudaStream_t stream, const std::string& what) {
  const Wrong wrong = bench.verdict(stream);
  tally.check(wrong.count == 0, text("rank %d: %s: %s", rank.rank, what.c_str(), describe(wrong).c_str()));
}

// Both streams are fed without the host in between, in another order on every other rank.
void run_beside_nccl(Rank& rank, Watchdog& watchdog, Shared& shared, int rounds) {
  watchdog.stage(rank.rank, "joining NCCL", 120, rank.comm);
  if (rank.rank == 0) shared.nccl_id = shared.nccl.make_id();
  rank.meet();
  const Nccl::Comm nccl = shared.nccl.join(rank.nranks, shared.nccl_id, rank.rank);
  const cudaStream_t other = make_stream();
  constexpr size_t COUNT = 1 << 20;
  const Buffer data(COUNT * 4);
  const Judge judge;
  auto* floats = static_cast<float*>(data.data);
  const auto reduce = [&](int round) {
    const float sum = static_cast<float>(rank.nranks * (rank.nranks + 1) / 2 + rank.nranks * round);
    fill_floats(floats, COUNT, static_cast<float>(rank.rank + 1 + round), other);
    shared.nccl.all_reduce(floats, COUNT, nccl, other);
    check_floats(floats, COUNT, sum, round, judge.wrong(), other);
  };
  // NCCL connects in its first collectives, which would wait for kernels that wait for peers.
  for (int round = 0; round < 3; ++round) reduce(round);
  require_cuda(cudaStreamSynchronize(other), "NCCL alone");
  for (const Problem& problem : usual_problems()) {
    const std::string name = "beside NCCL: " + describe(problem, rank.nranks);
    watchdog.stage(rank.rank, name, 60, rank.comm);
    const Bench bench(rank, problem);
    Leash leash(8), other_leash(8);
    rank.meet();
    for (int round = 0; round < rounds; ++round) {
      const bool is_first = (rank.rank + round) % 2 == 0;
      if (is_first) reduce(round);
      bench.launch(rank.stream, round);
      if (!is_first) reduce(round);
      if (round % 8 == 0) leash.mark(rank.stream), other_leash.mark(other);
    }
    rank.synchronize();
    require_cuda(cudaStreamSynchronize(other), "NCCL beside");
    check_verdict(rank, bench, rank.stream, name);
    const Wrong wrong = judge.verdict(other);
    tally.check(wrong.count == 0,
                text("rank %d: %s: NCCL's sums: %s", rank.rank, name.c_str(), describe(wrong).c_str()));
    rank.meet();
  }
  shared.nccl.leave(nccl);
  cudaStreamDestroy(other);
  rank.meet();
}

// Two communicators, each on a stream of its own; even ranks launch on the first one first, odd ranks on the
// second. Their grids fit on the GPU together.
void run_opposite(Rank& rank, Watchdog& watchdog, int max_ctas, int rounds) {
  const mk_comm_t comms[] = {make_communicator(rank, max_ctas), make_communicator(rank, max_ctas)};
  const cudaStream_t streams[] = {make_stream(), make_stream()};
  watchdog.stage(rank.rank, "two communicators in opposite order", 60, comms[rank.rank % 2]);
  {
    const std::vector<Problem> problems = usual_problems();
    const Bench one(rank.rank, rank.nranks, comms[0], problems[0]);
    const Bench other(rank.rank, rank.nranks, comms[1], problems[2]);
    const Bench* benches[] = {&one, &other};
    Leash leashes[] = {Leash(8), Leash(8)};
    rank.meet();
    for (int round = 0; round < rounds; ++round) {
      for (int i = 0; i < 2; ++i) {
        const int which = (rank.rank + round / 50 + i) % 2;
        benches[which]->launch(streams[which], round);
        if (round % 8 == 0) leashes[which].mark(streams[which]);
      }
    }
    for (int i = 0; i < 2; ++i) {
      const mk_status_t status = mk_comm_synchronize(comms[i], streams[i]);
      tally.check(status == MK_SUCCESS, text("rank %d: two communicators in opposite order: %s: %s", rank.rank,
                                             mk_status_string(status), mk_get_last_error(comms[i])));
      check_verdict(rank, *benches[i], streams[i], "two communicators in opposite order");
    }
    rank.meet();
  }
  for (int i = 0; i < 2; ++i) {
    require(mk_comm_finalize(comms[i]), "mk_comm_finalize", comms[i]);
    require(mk_comm_destroy(comms[i]), "mk_comm_destroy", nullptr);
    cudaStreamDestroy(streams[i]);
  }
  rank.meet();
}

bool has_ended(cudaStream_t stream, int limit_ms) {
  for (int waited_ms = 0; cudaStreamQuery(stream) == cudaErrorNotReady; ++waited_ms) {
    if (waited_ms >= limit_ms) return false;
    usleep(1000);
  }
  return true;
}

// The same with grids that hold the whole GPU: each waits for what the other keeps from starting. A peer that
// has not entered is waited for, so only an abort ends this; it has to, for everybody, with a sentence.
void run_deadlocked(Rank& rank, Watchdog& watchdog) {
  const mk_comm_t comms[] = {make_communicator(rank, 0), make_communicator(rank, 0)};
  const cudaStream_t streams[] = {make_stream(), make_stream()};
  watchdog.stage(rank.rank, "whole grids in opposite order", 60, comms[rank.rank % 2]);
  {
    const Problem problem = usual_problems()[0];
    const Bench one(rank.rank, rank.nranks, comms[0], problem),
        other(rank.rank, rank.nranks, comms[1], problem);
    const Bench* benches[] = {&one, &other};
    rank.meet();
    mk_status_t enqueued[2] = {};
    for (int i = 0; i < 2; ++i) {
      const int which = (rank.rank + i) % 2;
      enqueued[which] = benches[which]->call(streams[which]);
      usleep(20000);  // it is on the GPU before the other comes
    }
    const bool ends_alone = has_ended(streams[0], 3000) && has_ended(streams[1], 3000);
    rank.meet();
    if (rank.rank == 0) {
      tally.say(ends_alone
                    ? "whole grids in opposite order: they end by themselves"
                    : "whole grids in opposite order: they wait for each other; rank 0 aborts the first");
      if (!ends_alone) require(mk_comm_abort(comms[0]), "mk_comm_abort", comms[0]);
    }
    for (int i = 0; i < 2; ++i) {
      tally.check(has_ended(streams[i], 10000),
                  text("rank %d: communicator %d does not end after an abort", rank.rank, i));
      const mk_status_t status = mk_comm_synchronize(comms[i], streams[i]);
      const bool is_named = i == 0 && (status == MK_ERROR_ABORTED || status == MK_ERROR_REMOTE) &&
                            std::strstr(mk_get_last_error(comms[i]), "rank 0") != nullptr;
      tally.check(enqueued[i] == MK_SUCCESS && (status == MK_SUCCESS || is_named),
                  text("rank %d: whole grids in opposite order, communicator %d: %s: %s", rank.rank, i,
                       mk_status_string(status), mk_get_last_error(comms[i])));
    }
    rank.meet();
  }
  for (const mk_comm_t comm : comms) require(mk_comm_destroy(comm), "mk_comm_destroy", nullptr);
  for (const cudaStream_t stream : streams) cudaStreamDestroy(stream);
  rank.meet();
}

// A kernel on another stream holds every SM, on other ranks at other moments, longer than some launches take.
void run_occupied(Rank& rank, Watchdog& watchdog, int rounds) {
  watchdog.stage(rank.rank, "on occupied GPUs", 90, rank.comm);
  const cudaStream_t other = make_stream();
  const Bench bench(rank, usual_problems()[1]);
  Leash leash(4);
  rank.meet();
  for (int round = 0; round < rounds; ++round) {
    if (round % rank.nranks == rank.rank) occupy(300, other);
    bench.launch(rank.stream, round);
    if (round % 8 == 0) leash.mark(rank.stream);
  }
  rank.synchronize();
  require_cuda(cudaStreamSynchronize(other), "the kernel beside");
  check_verdict(rank, bench, rank.stream, "on occupied GPUs");
  cudaStreamDestroy(other);
  rank.meet();
}

double median_of(std::vector<double> times) {
  std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
  return times[times.size() / 2];
}

// Pointers change with every call, and the stream is empty.
void measure_calls(Rank& rank, Watchdog& watchdog, const Problem& problem, bool is_strict) {
  const std::string name = describe(problem, rank.nranks);
  watchdog.stage(rank.rank, "the host's time: " + name, 60, rank.comm);
  const Bench benches[] = {Bench(rank, problem), Bench(rank, problem), Bench(rank, problem),
                           Bench(rank, problem)};
  for (const Bench& bench : benches) {
    next_turn(bench.judge().turn(), rank.stream);
    fill_operands(bench.operands(), Filling::pattern, bench.judge().turn(), rank.stream);
  }
  require_cuda(cudaStreamSynchronize(rank.stream), "filling");
  constexpr int CALLS = 1000;
  std::vector<double> times;
  for (int i = 0; i < CALLS + 50; ++i) {
    rank.meet();
    const auto begin = std::chrono::steady_clock::now();
    const mk_status_t status = benches[i % 4].call(rank.stream);
    const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - begin;
    require(status, name.c_str(), rank.comm);
    if (i >= 50) times.push_back(took.count());
    require_cuda(cudaStreamSynchronize(rank.stream), "a call");
  }
  rank.synchronize();
  const double median = median_of(times);
  if (rank.rank == 0)
    tally.say(text("the host's time of a call, median of %d: %.2f us: %s", CALLS, median, name.c_str()));
  if (is_strict) {
    tally.check(median <= CALL_LIMIT_US, text("rank %d: a call takes the host %.2f us, at most %.0f wanted: %s",
                                              rank.rank, median, CALL_LIMIT_US, name.c_str()));
  }
  rank.meet();
}

}  // namespace

int main(int argc, char** argv) {
  // So few channels that its kernels fit on the SMs left free.
  setenv("NCCL_MAX_NCHANNELS", "8", 1);
  setenv("NCCL_MAX_CTAS", "8", 1);
  setenv("NCCL_NVLS_ENABLE", "0", 1);
  const Options options = start(argc, argv);
  const int num_devices = require_devices();
  const bool shares = options.nranks > num_devices;
  Shared shared;
  const bool has_nccl = shared.nccl.present() && !shares && options.nranks > 1;
  if (!has_nccl) {
    tally.say(shares               ? "NCCL: skipped, ranks share a GPU"
              : options.nranks < 2 ? "NCCL: skipped, one rank"
                                   : "NCCL: skipped, there is no libnccl.so.2");
  }
  Watchdog watchdog(tally, options.nranks);
  const int rounds = options.quick ? 50 : 200;
  run_ranks(
      options.nranks,
      [&](Rank& rank) {
        load_pattern_kernels(rank.stream);
        rank.meet();
        if (has_nccl) run_beside_nccl(rank, watchdog, shared, rounds);
        const int ranks_per_device = (rank.nranks + num_devices - 1) / num_devices;
        run_opposite(rank, watchdog, num_sms(rank.device) / ranks_per_device / 2 - 2, rounds);
        if (!shares && rank.nranks > 1) run_deadlocked(rank, watchdog);
        if (!shares) run_occupied(rank, watchdog, rounds);
        for (const Problem& problem : usual_problems()) measure_calls(rank, watchdog, problem, options.strict);
        watchdog.stage(rank.rank, "leaving", 60, rank.comm);
      },
      [&](mk_comm_config_t& config) {
        if (!shares) config.reserved_sms = RESERVED_SMS;
      });
  return tally.finish();
}
