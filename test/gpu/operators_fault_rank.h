// SPDX-License-Identifier: MIT
// One rank of a scene of operators_fault_test: a process that does what the scene asks of it, and what it
// reports.
#pragma once

#include "operators_run.h"

namespace operators {

constexpr int MAX_RANKS = 8;
constexpr int WAIT_TIMEOUT_MS = 400;

inline int64_t now_ms() {
  return std::chrono::duration_cast<std::chrono::milliseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

enum class Fault {
  late,           // the victim launches long after the others, beyond wait_timeout_ms
  abort_absent,   // the victim never launches, and aborts
  abort_waiting,  // the victim never launches; a rank that waits for it aborts
  kill_absent,    // the victim never launches, and is killed
  kill_running,   // killed in the middle of launches
  stop_absent,    // the victim never launches, and is stopped
  slow,           // the victim enters the launch and takes longer than wait_timeout_ms to do its part
};

struct Scene {
  const char* name;
  Fault fault;
  Problem problem;
  int victim;
  int delay_ms;  // from everybody's readiness to the fault
};

// What a rank says in the end.
struct Report {
  mk_status_t status;  // of the faulty launch
  mk_async_error_t error;
  int64_t ended_ms;          // when it returned
  uint64_t epoch;            // of the launch
  mk_flight_entry_t flight;  // the last launch, when it has ended
  int abort_ms;              // how long mk_comm_abort took, where it was called; else -1
  bool idle;                 // the stream has ended and the device is well
  mk_status_t destroyed;
  int destroy_ms;
  mk_status_t second;        // what became of the second communicator
  unsigned long long wrong;  // elements, in both
  char sentence[700];
  char second_sentence[300];
};

// Shared by the processes of a scene.
struct Board {
  std::atomic<int> id_made[2];
  mk_unique_id_t id[2];
  std::atomic<int> num_ready;
  std::atomic<int64_t> struck_ms;  // 0: not yet
  std::atomic<int> reported[MAX_RANKS];
  Report reports[MAX_RANKS];
  char stages[MAX_RANKS][64];
};

template <class Condition>
bool eventually(int limit_ms, Condition&& holds) {
  const int64_t end = now_ms() + limit_ms;
  while (!holds()) {
    if (now_ms() > end) return false;
    usleep(500);
  }
  return true;
}

// A rank of a scene, in its own process.
class RankProcess {
 public:
  RankProcess(Board& board, const Scene& scene, int rank, int nranks, int num_devices)
      : board_(board), scene_(scene), rank_(rank), nranks_(nranks), device_(rank % num_devices) {}

  void run() {
    stage("starting");
    require_cuda(cudaSetDevice(device_), "cudaSetDevice");
    require_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
    load_pattern_kernels(stream_);
    Report& report = board_.reports[rank_];
    report.abort_ms = -1;
    join(0, nranks_, rank_);
    run_scene(report);
    // In good order a rank that just left would abort what others have not ended yet.
    stage("finalizing");
    if (report.status == MK_SUCCESS) report.status = mk_comm_finalize(comm_);
    stage("destroying");
    const int64_t begin = now_ms();
    report.destroyed = mk_comm_destroy(comm_);
    report.destroy_ms = static_cast<int>(now_ms() - begin);
    go_on(report);
    board_.reported[rank_].store(1, std::memory_order_release);
  }

 private:
  bool is_victim() const { return rank_ == scene_.victim; }
  void stage(const char* name) { std::snprintf(board_.stages[rank_], sizeof board_.stages[rank_], "%s", name); }

  void join(int which, int nranks, int rank) {
    stage(which == 0 ? "joining" : "joining the second communicator");
    if (rank == 0) {
      require(mk_get_unique_id(&board_.id[which]), "mk_get_unique_id", nullptr);
      board_.id_made[which].store(1, std::memory_order_release);
    }
    if (!eventually(60000, [&] { return board_.id_made[which].load(std::memory_order_acquire) == 1; }))
      std::_Exit(3);
    mk_comm_config_t config = MK_COMM_CONFIG_INIT;
    config.device = MK_DEVICE_CUDA;
    config.cuda_device = device_;
    config.wait_timeout_ms = WAIT_TIMEOUT_MS;
    config.peer_timeout_ms = 2000;
    require(mk_comm_init(&comm_, &board_.id[which], nranks, rank, &config), "mk_comm_init", comm_);
  }

  mk_status_t checked(const Problem& problem, const Operands& operands, const Judge& judge) {
    next_turn(judge.turn(), stream_);
    fill_operands(operands, Filling::pattern, judge.turn(), stream_);
    if (const mk_status_t status = call(comm_, problem, operands, stream_); status != MK_SUCCESS) return status;
    check_results(operands, judge.turn(), 0, judge.wrong(), stream_);
    return mk_comm_synchronize(comm_, stream_);
  }

  void run_scene(Report& report) {
    const Problem& problem = scene_.problem;
    Sizes sizes;
    sizes.cover(problem, rank_, nranks_);
    const Matrices matrices(sizes);
    Operands operands = matrices.operands(problem, rank_, nranks_);
    const Judge judge;
    require(prepare(comm_, problem), "prepare", comm_);
    stage("a launch in good order");
    require(checked(problem, operands, judge), "a launch in good order", comm_);
    // A victim that is slow has a slice of the inner dimension that takes seconds.
    const bool crawls = scene_.fault == Fault::slow && is_victim();
    const int64_t long_k = int64_t{1} << 29;
    const Buffer long_a(crawls ? problem.m * long_k * 2 : 0), long_b(crawls ? long_k * 2 : 0);
    if (crawls) {
      require_cuda(cudaMemset(long_a.data, 0, long_a.bytes), "cudaMemset");
      require_cuda(cudaMemset(long_b.data, 0, long_b.bytes), "cudaMemset");
      require_cuda(cudaDeviceSynchronize(), "cudaMemset");
      operands.a = long_a.data, operands.b = long_b.data;
      operands.k = operands.lda = operands.ldb = long_k;
    }
    board_.num_ready.fetch_add(1);
    if (!eventually(60000, [&] { return board_.num_ready.load() == nranks_; })) std::_Exit(4);
    stage("the fault");
    report.status = suffer(operands, judge, report);
    report.ended_ms = now_ms();
    std::snprintf(report.sentence, sizeof report.sentence, "%s", mk_get_last_error(comm_));
    report.error = MK_ASYNC_ERROR_INIT;
    mk_comm_get_async_error(comm_, &report.error);
    mk_comm_info_t info = MK_COMM_INFO_INIT;
    if (mk_comm_get_info(comm_, &info) == MK_SUCCESS) report.epoch = info.epoch;
    stage("after the fault");
    report.idle = cudaStreamSynchronize(stream_) == cudaSuccess && cudaDeviceSynchronize() == cudaSuccess;
    mk_flight_entry_t flight{};
    size_t count = 0;
    if (mk_comm_get_flight_record(comm_, &flight, 1, &count) == MK_SUCCESS && count == 1)
      report.flight = flight;
    if (report.status == MK_SUCCESS) report.wrong += judge.verdict(stream_).count;
  }

  void strike() { board_.struck_ms.store(now_ms()); }
  void abort_now(Report& report) {
    strike();
    const int64_t begin = now_ms();
    require(mk_comm_abort(comm_), "mk_comm_abort", comm_);
    report.abort_ms = static_cast<int>(now_ms() - begin);
  }
  // Without a launch of its own.
  mk_status_t await_error() {
    mk_async_error_t error = MK_ASYNC_ERROR_INIT;
    eventually(30000, [&] {
      return mk_comm_get_async_error(comm_, &error) != MK_SUCCESS || error.status != MK_SUCCESS;
    });
    return mk_comm_synchronize(comm_, stream_);
  }

  // Does the launch of the scene, or does not; what came of it.
  mk_status_t suffer(const Operands& operands, const Judge& judge, Report& report) {
    const Problem& problem = scene_.problem;
    const auto pause = [&] { usleep(static_cast<useconds_t>(scene_.delay_ms) * 1000); };
    switch (scene_.fault) {
      case Fault::late:
        if (is_victim()) pause();
        return checked(problem, operands, judge);
      case Fault::abort_absent:
        if (!is_victim()) break;
        pause();
        abort_now(report);
        return mk_comm_synchronize(comm_, stream_);
      case Fault::abort_waiting: {
        if (is_victim()) return await_error();
        if (rank_ != (scene_.victim + 1) % nranks_) break;
        std::thread aborter([&] {
          pause();
          abort_now(report);
        });
        const mk_status_t status = launch_and_wait(operands);
        aborter.join();
        return status;
      }
      case Fault::kill_absent:
      case Fault::stop_absent:
        // Killed by the test while it waits; stopped, it goes on later and finds the others gone.
        if (is_victim()) return await_error();
        break;
      case Fault::kill_running: {
        Leash leash(8);
        const int64_t end = now_ms() + 30000;
        mk_status_t status = MK_SUCCESS;
        while (status == MK_SUCCESS && now_ms() < end) {
          status = call(comm_, problem, operands, stream_);
          leash.mark(stream_);
        }
        return mk_comm_synchronize(comm_, stream_);
      }
      case Fault::slow:
        if (is_victim()) strike();
        break;
    }
    return launch_and_wait(operands);
  }

  mk_status_t launch_and_wait(const Operands& operands) {
    const mk_status_t status = call(comm_, scene_.problem, operands, stream_);
    return status != MK_SUCCESS ? status : mk_comm_synchronize(comm_, stream_);
  }

  // Those who are left make a new communicator.
  void go_on(Report& report) {
    const bool loses_victim = scene_.fault == Fault::kill_absent || scene_.fault == Fault::kill_running ||
                              scene_.fault == Fault::stop_absent;
    if (loses_victim && is_victim()) return;
    join(1, nranks_ - (loses_victim ? 1 : 0), rank_ - (loses_victim && rank_ > scene_.victim ? 1 : 0));
    stage("launches of the second communicator");
    const int nranks = nranks_ - (loses_victim ? 1 : 0);
    const int rank = rank_ - (loses_victim && rank_ > scene_.victim ? 1 : 0);
    for (const mk_operator_t op :
         {MK_OPERATOR_ALLGATHER_GEMM, MK_OPERATOR_GEMM_REDUCE_SCATTER, MK_OPERATOR_GEMM_ALLREDUCE}) {
      const Problem problem{.op = op, .m = 300, .n = 264, .k = 136};
      Sizes sizes;
      sizes.cover(problem, rank, nranks);
      const Matrices matrices(sizes);
      const Judge judge;
      report.second = prepare(comm_, problem);
      if (report.second == MK_SUCCESS)
        report.second = checked(problem, matrices.operands(problem, rank, nranks), judge);
      if (report.second != MK_SUCCESS) break;
      report.wrong += judge.verdict(stream_).count;
    }
    stage("leaving");
    if (report.second == MK_SUCCESS) report.second = mk_comm_finalize(comm_);
    std::snprintf(report.second_sentence, sizeof report.second_sentence, "%s", mk_get_last_error(comm_));
    mk_comm_destroy(comm_);
  }

  Board& board_;
  const Scene& scene_;
  const int rank_, nranks_, device_;
  mk_comm_t comm_ = nullptr;
  cudaStream_t stream_ = nullptr;
};

}  // namespace operators
