// SPDX-License-Identifier: MIT
// Calls on GPUs that cannot work: each is a status and a sentence, and the communicator goes on with right
// results, as mkernel.h promises. Ranks are threads; what may end a CUDA context runs in a process of its own.
//
//   operators_misuse_test [--ranks N]
#include <sys/wait.h>

#include <cerrno>
#include <optional>

#include "operators_run.h"

namespace {

using namespace operators;

Tally tally;

constexpr mk_operator_t ALL_OPERATORS[] = {MK_OPERATOR_ALLGATHER_GEMM, MK_OPERATOR_GEMM_REDUCE_SCATTER,
                                           MK_OPERATOR_GEMM_ALLREDUCE};

// Where ranks meet to make a communicator beside the one they have.
mk_unique_id_t shared_id;

mk_comm_t make_communicator(Rank& rank, mk_comm_config_t config) {
  if (rank.rank == 0) require(mk_get_unique_id(&shared_id), "mk_get_unique_id", nullptr);
  rank.meet();
  config.device = MK_DEVICE_CUDA;
  config.cuda_device = rank.device;
  mk_comm_t comm = nullptr;
  require(mk_comm_init(&comm, &shared_id, rank.nranks, rank.rank, &config), "mk_comm_init", comm);
  return comm;
}

// Several communicators and ranks fit on a GPU together.
mk_comm_config_t small_grid() {
  mk_comm_config_t config = MK_COMM_CONFIG_INIT;
  config.max_ctas = 8;
  return config;
}

bool says(const char* sentence, const std::string& words) {
  return std::strstr(sentence, words.c_str()) != nullptr;
}

// The communicator is as usable as before.
void check_usable(Rank& rank, const std::string& after) {
  const Problem problem{.op = MK_OPERATOR_GEMM_REDUCE_SCATTER, .m = 300, .n = 264, .k = 136};
  const Bench bench(rank, problem);
  rank.meet();
  for (int launch = 0; launch < 3; ++launch) bench.launch(rank.stream, launch);
  const mk_status_t status = mk_comm_synchronize(rank.comm, rank.stream);
  const std::string sentence = mk_get_last_error(rank.comm);
  const Wrong wrong = bench.verdict(rank.stream);
  tally.check(status == MK_SUCCESS && wrong.count == 0,
              text("rank %d: after %s: %s: %s; %s", rank.rank, after.c_str(), mk_status_string(status),
                   sentence.c_str(), describe(wrong).c_str()));
  rank.meet();
}

// Refused by one rank alone, before anything is launched.
void refuse_operands(Rank& rank, const Problem& problem) {
  const Bench bench(rank, problem);
  struct Refusal {
    const char* what;
    const char* words;
    std::function<void(Operands&)> spoil;
  };
  const auto shifted = [](void* data) { return static_cast<void*>(static_cast<char*>(data) + 2); };
  const Refusal refusals[] = {
      {"an unaligned A", ": a: expected a 16-byte aligned pointer",
       [&](Operands& of) { of.a = shifted(of.a); }},
      {"an unaligned B", ": b: expected a 16-byte aligned pointer",
       [&](Operands& of) { of.b = shifted(of.b); }},
      {"an unaligned C", ": c: expected a 16-byte aligned pointer",
       [&](Operands& of) { of.c = shifted(of.c); }},
      {"no A", ": a: expected a pointer", [](Operands& of) { of.a = nullptr; }},
      {"no C", ": c: expected a pointer", [](Operands& of) { of.c = nullptr; }},
      {"an odd lda", ": lda: expected rows 16 bytes aligned", [](Operands& of) { of.lda += 3; }},
      {"a short ldb", ": ldb: expected at least", [](Operands& of) { of.ldb = 8; }},
      {"C on top of A", "overlaps", [](Operands& of) { of.c = of.a; }},
  };
  for (const Refusal& refusal : refusals) {
    Operands operands = bench.operands();
    refusal.spoil(operands);
    const mk_status_t status = call(rank.comm, problem, operands, rank.stream);
    const std::string sentence = mk_get_last_error(rank.comm);
    tally.check(status == MK_ERROR_INVALID_ARGUMENT && says(sentence.c_str(), refusal.words),
                text("rank %d: %s: %s: %s: %s", rank.rank, describe(problem, rank.nranks).c_str(), refusal.what,
                     mk_status_string(status), sentence.c_str()));
  }
  rank.meet();
}

// The status is the library's and the sentence speaks of the stream, not of what a kernel would have done.
void refuse_stream(Rank& rank) {
  int num_devices = 0;
  require_cuda(cudaGetDeviceCount(&num_devices), "cudaGetDeviceCount");
  if (num_devices < 2) {
    if (rank.rank == 0) tally.say("a stream of another device: not tried, there is one GPU");
    return;
  }
  // One of its own, so that what follows does not depend on this.
  const mk_comm_t comm = make_communicator(rank, small_grid());
  cudaStream_t foreign = nullptr;
  require_cuda(cudaSetDevice((rank.device + 1) % num_devices), "cudaSetDevice");
  require_cuda(cudaStreamCreateWithFlags(&foreign, cudaStreamNonBlocking), "cudaStreamCreate");
  require_cuda(cudaSetDevice(rank.device), "cudaSetDevice");
  {
    const Bench bench(rank.rank, rank.nranks, comm,
                      {.op = MK_OPERATOR_ALLGATHER_GEMM, .m = 64, .n = 64, .k = 64});
    const mk_status_t status = bench.call(foreign);
    const std::string sentence = mk_get_last_error(comm);
    tally.check(status == MK_ERROR_INVALID_ARGUMENT && says(sentence.c_str(), "stream"),
                text("rank %d: a stream of another device: %s: %s", rank.rank, mk_status_string(status),
                     sentence.c_str()));
    int current = -1;
    require_cuda(cudaGetDevice(&current), "cudaGetDevice");
    tally.check(current == rank.device,
                text("rank %d: the current device was changed to %d", rank.rank, current));
    cudaGetLastError();
    rank.meet();
    // The launch that did not happen is missed on no rank.
    next_turn(bench.judge().turn(), rank.stream);
    fill_operands(bench.operands(), Filling::pattern, bench.judge().turn(), rank.stream);
    mk_status_t after = bench.call(rank.stream);
    check_results(bench.operands(), bench.judge().turn(), 0, bench.judge().wrong(), rank.stream);
    if (const mk_status_t ended = mk_comm_synchronize(comm, rank.stream); after == MK_SUCCESS) after = ended;
    tally.check(after == MK_SUCCESS && bench.verdict(rank.stream).count == 0,
                text("rank %d: after a stream of another device: %s: %s", rank.rank, mk_status_string(after),
                     mk_get_last_error(comm)));
    rank.meet();
  }
  cudaStreamDestroy(foreign);
  mk_comm_finalize(comm);
  require(mk_comm_destroy(comm), "mk_comm_destroy", nullptr);
  rank.meet();
}

struct Disagreement {
  const char* what;
  Problem usual;
  Problem victims;
};

// What the last rank calls differs.
void disagree(Rank& rank, const Disagreement& of, Watchdog& watchdog) {
  watchdog.stage(rank.rank, of.what, 60, rank.comm);
  const int victim = rank.nranks - 1;
  const Bench usual(rank, of.usual), other(rank, of.victims);
  rank.meet();
  const Bench& bench = rank.rank == victim ? other : usual;
  const mk_status_t enqueued = bench.call(rank.stream);
  const mk_status_t status = mk_comm_synchronize(rank.comm, rank.stream);
  const std::string sentence = mk_get_last_error(rank.comm);
  mk_async_error_t error = MK_ASYNC_ERROR_INIT;
  mk_comm_get_async_error(rank.comm, &error);
  const bool names = says(sentence.c_str(), text("rank %d", victim)) ||
                     says(sentence.c_str(), text("ranks %d", victim)) ||
                     says(sentence.c_str(), text("and %d", victim));
  tally.check(
      enqueued == MK_SUCCESS && status == MK_ERROR_MISMATCH && error.status == MK_ERROR_MISMATCH && names,
      text("rank %d: %s: %s, then %s: %s", rank.rank, of.what, mk_status_string(enqueued),
           mk_status_string(status), sentence.c_str()));
  rank.meet();
  const mk_status_t cleared = mk_comm_clear_async_error(rank.comm);
  tally.check(cleared == MK_SUCCESS, text("rank %d: %s: mk_comm_clear_async_error: %s", rank.rank, of.what,
                                          mk_status_string(cleared)));
  check_usable(rank, of.what);
}

std::vector<Disagreement> make_disagreements() {
  const Problem gather{.op = MK_OPERATOR_ALLGATHER_GEMM, .m = 512, .n = 264, .k = 328};
  const Problem scatter{.op = MK_OPERATOR_GEMM_REDUCE_SCATTER, .m = 512, .n = 264, .k = 136};
  const Problem reduce{
      .op = MK_OPERATOR_GEMM_ALLREDUCE, .m = 512, .n = 264, .k = 136, .algorithm = MK_ALGORITHM_TWO_SHOT};
  const auto with = [](Problem problem, const std::function<void(Problem&)>& change) {
    change(problem);
    return problem;
  };
  return {
      {"another m in AG+GEMM", gather, with(gather, [](Problem& of) { of.m = 1024; })},
      {"another k in AG+GEMM", gather, with(gather, [](Problem& of) { of.k = 136; })},
      {"another n in GEMM+RS", scatter, with(scatter, [](Problem& of) { of.n = 520; })},
      {"a smaller m in GEMM+RS", scatter, with(scatter, [](Problem& of) { of.m = 130; })},
      {"another operator", scatter, gather},
      {"another type in GEMM+AR", reduce, with(reduce, [](Problem& of) { of.out = MK_DTYPE_FP32; })},
      {"another algorithm", reduce, with(reduce, [](Problem& of) { of.algorithm = MK_ALGORITHM_ONE_SHOT; })},
  };
}

// More than there are addresses for, and more than one rank has room for.
void run_out_of_memory(Rank& rank, Watchdog& watchdog) {
  watchdog.stage(rank.rank, "out of device memory", 180, rank.comm);
  const Problem absurd{.op = MK_OPERATOR_ALLGATHER_GEMM, .m = 1 << 20, .n = 64, .k = 1 << 20};
  const auto check = [&](mk_status_t status, const std::string& what) {
    const std::string sentence = mk_get_last_error(rank.comm);
    tally.check(
        status == MK_ERROR_OUT_OF_MEMORY && !sentence.empty(),
        text("rank %d: %s: %s: %s", rank.rank, what.c_str(), mk_status_string(status), sentence.c_str()));
  };
  check(prepare(rank.comm, absurd), "2 TiB");
  check_usable(rank, "an absurd prepare");
  const int victim = rank.nranks - 1;
  std::optional<Buffer> ballast;
  if (rank.rank == victim) {
    size_t free = 0, total = 0;
    require_cuda(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
    if (free > size_t{3} << 30) ballast.emplace(free - (size_t{2} << 30));
  }
  rank.meet();
  // Two banks of 2 GiB.
  const Problem large{.op = MK_OPERATOR_ALLGATHER_GEMM, .m = 1 << 16, .n = 64, .k = 1 << 14};
  check(prepare(rank.comm, large), text("4 GiB where rank %d has 2", victim));
  void* memory = nullptr;
  check(mk_mem_alloc(rank.comm, size_t{4} << 30, &memory),
        text("mk_mem_alloc where rank %d has 2 GiB", victim));
  rank.meet();
  ballast.reset();
  rank.meet();
  const mk_status_t status = mk_mem_alloc(rank.comm, size_t{64} << 20, &memory);
  tally.check(status == MK_SUCCESS, text("rank %d: mk_mem_alloc afterwards: %s: %s", rank.rank,
                                         mk_status_string(status), mk_get_last_error(rank.comm)));
  if (status == MK_SUCCESS) require(mk_mem_free(rank.comm, memory), "mk_mem_free", rank.comm);
  check_usable(rank, "a prepare for which one rank has no room");
}

// Calls on two communicators in one graph.
void capture_two(Rank& rank, Watchdog& watchdog) {
  const mk_comm_t second = make_communicator(rank, small_grid());
  watchdog.stage(rank.rank, "a graph of two communicators", 60, second);
  const Problem problems[] = {{.op = MK_OPERATOR_GEMM_ALLREDUCE, .m = 64, .n = 264, .k = 136},
                              {.op = MK_OPERATOR_ALLGATHER_GEMM, .m = 300, .n = 136, .k = 264}};
  {
    const Bench one(rank, problems[0]);
    const Bench other(rank.rank, rank.nranks, second, problems[1]);
    Leash leash(8);
    rank.meet();
    require_cuda(cudaStreamBeginCapture(rank.stream, cudaStreamCaptureModeThreadLocal),
                 "cudaStreamBeginCapture");
    require(one.call(rank.stream), "capture", rank.comm);
    require(other.call(rank.stream), "capture", second);
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t replay = nullptr;
    require_cuda(cudaStreamEndCapture(rank.stream, &graph), "cudaStreamEndCapture");
    size_t nodes = 0;
    require_cuda(cudaGraphGetNodes(graph, nullptr, &nodes), "cudaGraphGetNodes");
    tally.check(nodes == 2, text("rank %d: two calls made %zu nodes", rank.rank, nodes));
    require_cuda(cudaGraphInstantiate(&replay, graph, 0), "cudaGraphInstantiate");
    require_cuda(cudaGraphUpload(replay, rank.stream), "cudaGraphUpload");
    require_cuda(cudaStreamSynchronize(rank.stream), "cudaGraphUpload");
    rank.meet();
    for (int turn = 0; turn < 50; ++turn) {
      for (const Bench* bench : {&one, &other}) {
        next_turn(bench->judge().turn(), rank.stream);
        fill_operands(bench->operands(), Filling::pattern, bench->judge().turn(), rank.stream);
      }
      require_cuda(cudaGraphLaunch(replay, rank.stream), "cudaGraphLaunch");
      for (const Bench* bench : {&one, &other})
        check_results(bench->operands(), bench->judge().turn(), turn, bench->judge().wrong(), rank.stream);
      if (turn % 4 == 0) leash.mark(rank.stream);
    }
    const mk_status_t first_status = mk_comm_synchronize(rank.comm, rank.stream);
    const mk_status_t second_status = mk_comm_synchronize(second, rank.stream);
    const unsigned long long wrong = one.verdict(rank.stream).count + other.verdict(rank.stream).count;
    tally.check(first_status == MK_SUCCESS && second_status == MK_SUCCESS && wrong == 0,
                text("rank %d: a graph of two communicators: %s, %s, %llu wrong", rank.rank,
                     mk_status_string(first_status), mk_status_string(second_status), wrong));
    rank.meet();
    cudaGraphExecDestroy(replay);
    cudaGraphDestroy(graph);
  }
  require(mk_comm_finalize(second), "mk_comm_finalize", second);
  require(mk_comm_destroy(second), "mk_comm_destroy", nullptr);
  rank.meet();
}

// Two launches on two streams that nothing orders, the first of which waits for a peer. Either the library
// orders them, or it says what is wrong.
void overlap(Rank& rank, Watchdog& watchdog) {
  const mk_comm_t comm = make_communicator(rank, small_grid());
  watchdog.stage(rank.rank, "two launches at a time", 60, comm);
  cudaStream_t other_stream = nullptr;
  require_cuda(cudaStreamCreateWithFlags(&other_stream, cudaStreamNonBlocking), "cudaStreamCreate");
  {
    const Bench bench(rank.rank, rank.nranks, comm,
                      {.op = MK_OPERATOR_ALLGATHER_GEMM, .m = 300, .n = 264, .k = 136});
    const Bench second(rank.rank, rank.nranks, comm,
                       {.op = MK_OPERATOR_ALLGATHER_GEMM, .m = 300, .n = 264, .k = 136});
    rank.meet();
    if (rank.rank != 0) usleep(700000);
    mk_status_t status = bench.call(rank.stream);
    if (status == MK_SUCCESS) status = second.call(other_stream);
    const mk_status_t one = mk_comm_synchronize(comm, rank.stream);
    const mk_status_t other = mk_comm_synchronize(comm, other_stream);
    const std::string sentence = mk_get_last_error(comm);
    if (status == MK_SUCCESS) status = one;
    if (status == MK_SUCCESS) status = other;
    const bool is_told =
        rank.rank == 0 ? says(sentence.c_str(), "order the streams") : says(sentence.c_str(), "rank 0");
    tally.check(status == MK_SUCCESS || is_told, text("rank %d: two launches at a time: %s: %s", rank.rank,
                                                      mk_status_string(status), sentence.c_str()));
    rank.meet();
  }
  require(mk_comm_destroy(comm), "mk_comm_destroy", nullptr);
  cudaStreamDestroy(other_stream);
  rank.meet();
}

void run_misuse(Rank& rank, Watchdog& watchdog) {
  for (const mk_operator_t op : ALL_OPERATORS) {
    watchdog.stage(rank.rank, "bad operands", 60, rank.comm);
    refuse_operands(rank, {.op = op, .m = 300, .n = 264, .k = 136});
  }
  check_usable(rank, "bad operands");
  watchdog.stage(rank.rank, "a stream of another device", 60, rank.comm);
  refuse_stream(rank);
  if (rank.nranks > 1) {
    for (const Disagreement& disagreement : make_disagreements()) disagree(rank, disagreement, watchdog);
  }
  capture_two(rank, watchdog);
  if (rank.nranks > 1) {
    overlap(rank, watchdog);
    run_out_of_memory(rank, watchdog);
  }
  watchdog.stage(rank.rank, "leaving", 60, rank.comm);
}

// Two ranks on one GPU: refused, naming both.
void refuse_shared_gpu() {
  unsetenv("MK_SHARE_GPU");
  mk_unique_id_t id;
  require(mk_get_unique_id(&id), "mk_get_unique_id", nullptr);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      mk_comm_config_t config = MK_COMM_CONFIG_INIT;
      config.device = MK_DEVICE_CUDA;
      config.cuda_device = 0;
      mk_comm_t comm = nullptr;
      const mk_status_t status = mk_comm_init(&comm, &id, 2, rank, &config);
      const std::string sentence = mk_get_last_error(comm);
      tally.check(status == MK_ERROR_INVALID_ARGUMENT, "ranks that share a GPU");
      tally.check(says(sentence.c_str(), "ranks 0 and 1 use the same GPU"),
                  "ranks that share a GPU: " + sentence);
      if (comm != nullptr) mk_comm_destroy(comm);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// In a process of its own, on device 0, with one rank: A where `make` says. Refused, an error of the
// communicator with a sentence, or (where the machine can) right: but no crash, no hang and no wrong result.
int call_with_foreign_memory(const std::function<void*(size_t)>& make) {
  alarm(60);
  require_cuda(cudaSetDevice(0), "cudaSetDevice");
  mk_unique_id_t id;
  mk_comm_t comm = nullptr;
  mk_comm_config_t config = MK_COMM_CONFIG_INIT;
  config.device = MK_DEVICE_CUDA;
  config.cuda_device = 0;
  require(mk_get_unique_id(&id), "mk_get_unique_id", nullptr);
  require(mk_comm_init(&comm, &id, 1, 0, &config), "mk_comm_init", comm);
  const Problem problem{.op = MK_OPERATOR_ALLGATHER_GEMM, .m = 300, .n = 264, .k = 136};
  const Bench bench(0, 1, comm, problem);
  cudaStream_t stream = nullptr;
  require_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  Operands operands = bench.operands();
  const size_t bytes = operands.a_rows * operands.lda * 2;
  next_turn(bench.judge().turn(), stream);
  fill_operands(operands, Filling::pattern, bench.judge().turn(), stream);
  void* foreign = make(bytes);
  require_cuda(cudaMemcpyAsync(foreign, operands.a, bytes, cudaMemcpyDefault, stream), "cudaMemcpyAsync");
  require_cuda(cudaStreamSynchronize(stream), "copying A");
  operands.a = foreign;
  const mk_status_t enqueued = call(comm, problem, operands, stream);
  const mk_status_t status = enqueued != MK_SUCCESS ? enqueued : mk_comm_synchronize(comm, stream);
  const std::string sentence = mk_get_last_error(comm);
  std::printf("  %s: %s\n", mk_status_string(status), sentence.c_str());
  std::fflush(stdout);
  if (status == MK_ERROR_INVALID_ARGUMENT || status == MK_ERROR_CUDA) return sentence.empty() ? 1 : 0;
  if (status != MK_SUCCESS) return 1;
  check_results(operands, bench.judge().turn(), 0, bench.judge().wrong(), stream);
  return bench.verdict(stream).count == 0 ? 0 : 1;
}

// Before this process uses CUDA: one that has cannot fork others that do.
void try_foreign_memory(const char* name, const std::function<void*(size_t)>& make) {
  tally.say(std::string(name) + ":");
  const pid_t process = fork();
  if (process == 0) std::_Exit(call_with_foreign_memory(make));
  int status = 0;
  while (process > 0 && waitpid(process, &status, 0) < 0 && errno == EINTR) continue;
  tally.check(process > 0 && WIFEXITED(status) && WEXITSTATUS(status) == 0,
              text("%s: the process ended with wait status %d", name, status));
}

int count_devices() {
  const pid_t process = fork();
  if (process == 0) std::_Exit(require_devices());
  int status = 0;
  while (process > 0 && waitpid(process, &status, 0) < 0 && errno == EINTR) continue;
  return WIFEXITED(status) ? WEXITSTATUS(status) : 0;
}

void* on_next_device(size_t bytes) {
  void* data = nullptr;
  require_cuda(cudaSetDevice(1), "cudaSetDevice");
  require_cuda(cudaMalloc(&data, bytes), "cudaMalloc");
  require_cuda(cudaSetDevice(0), "cudaSetDevice");
  return data;
}

}  // namespace

int main(int argc, char** argv) {
  set_environment();
  const int num_devices = count_devices();
  if (num_devices > 0 && num_devices != 77) {
    try_foreign_memory("A in pageable host memory",
                       [](size_t bytes) { return std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096); });
    if (num_devices > 1) try_foreign_memory("A on another device", on_next_device);
  }
  const Options options = start(argc, argv);
  refuse_shared_gpu();
  Watchdog watchdog(tally, options.nranks);
  run_ranks(options.nranks, [&](Rank& rank) {
    load_pattern_kernels(rank.stream);
    rank.meet();
    run_misuse(rank, watchdog);
  });
  return tally.finish();
}
