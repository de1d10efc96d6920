// SPDX-License-Identifier: MIT
// Ranks that do not do their part, while kernels of the others wait on GPUs. Ranks are processes: one is late,
// or is killed, stopped or aborted before its launch or in the middle of launches, or enters a launch and then
// is too slow. The others' kernels have to end by themselves, in time and with a sentence that names it, and
// their processes go on with a new communicator. With fewer GPUs than ranks these take turns on a GPU.
//
//   operators_fault_test [--ranks N] [--quick]
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include <cerrno>
#include <random>

#include "operators_run.h"

namespace {

using namespace operators;

constexpr int MAX_RANKS = 8;
constexpr int NAMED_WITHIN_MS = 10000;
constexpr int ABORT_WITHIN_MS = 5000;
constexpr int SCENE_SECONDS = 150;
constexpr int WAIT_TIMEOUT_MS = 400;

Tally tally;

int64_t now_ms() {
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
  int64_t ended_ms;  // when it returned
  uint64_t epoch;    // of the launch
  int abort_ms;      // how long mk_comm_abort took, where it was called; else -1
  bool idle;         // the stream has ended and the device is well
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

bool says(const Report& report, const std::string& words) {
  return std::strstr(report.sentence, words.c_str()) != nullptr;
}

// "rank 3" and not the beginning of "rank 31".
bool names(const Report& report, int rank) {
  const std::string wanted = "rank " + std::to_string(rank);
  for (const char* at = report.sentence; (at = std::strstr(at, wanted.c_str())) != nullptr; ++at) {
    const char behind = at[wanted.size()];
    if (behind < '0' || behind > '9') return true;
  }
  return false;
}

// The report of a wait, word for word.
std::string timeout_sentence(const Report& report, const Scene& scene, int rank) {
  const char* operators[] = {"", "allgather_gemm", "gemm_reduce_scatter", "gemm_allreduce"};
  const mk_async_error_t& error = report.error;
  return text(
      "rank %d, role %s, waited %d ms in %s (launch %llu) for %s %llu of rank %d: saw %llu, expected %llu. "
      "That rank "
      "has entered the launch but does not go on; look at its own error, or raise wait_timeout_ms",
      rank, error.role, WAIT_TIMEOUT_MS, operators[scene.problem.op],
      static_cast<unsigned long long>(error.epoch), error.object,
      static_cast<unsigned long long>(error.object_index), error.rank,
      static_cast<unsigned long long>(error.seen), static_cast<unsigned long long>(error.expected));
}

// Of a rank that has waited for one that is slow; true when it is the one whose patience ended.
bool check_timeout(const Scene& scene, int rank, const Report& report, const std::string& who) {
  const mk_async_error_t& error = report.error;
  if (report.status == MK_ERROR_REMOTE) {
    tally.check(error.rank >= 0 && error.rank != rank && names(report, error.rank) && says(report, "role"),
                who + "does not pass on whose wait ended");
    return false;
  }
  tally.check(report.status == MK_ERROR_TIMEOUT && error.status == MK_ERROR_TIMEOUT,
              who + "expected a timeout");
  tally.check(error.waiter_rank == rank && error.op == scene.problem.op, who + "waiter or operator is wrong");
  tally.check(
      error.epoch == 2 && error.expected == 2 && error.seen < 2,
      who + text("epoch %llu, seen %llu, expected %llu, where 2, less than 2 and 2 are true",
                 static_cast<unsigned long long>(error.epoch), static_cast<unsigned long long>(error.seen),
                 static_cast<unsigned long long>(error.expected)));
  const std::string role = error.role, object = error.object;
  const bool waits_for_victim = role == "reduce" && object == "partial" && error.rank == scene.victim;
  const bool is_two_shot = scene.problem.algorithm == MK_ALGORITHM_TWO_SHOT;
  const bool waits_for_owner =
      is_two_shot && role == "gather" && object == "reduced chunk" && error.rank != rank;
  tally.check(waits_for_victim || waits_for_owner,
              who + "role " + role + ", object " + object + text(", rank %d", error.rank));
  tally.check(error.object_index == 0, who + "there is only one object, of index 0");
  tally.check(report.sentence == timeout_sentence(report, scene, rank),
              who + "expected the sentence: " + timeout_sentence(report, scene, rank));
  return true;
}

void check_remote(const Scene& scene, const Report& report, const std::string& who, int culprit) {
  const char* words = scene.fault == Fault::stop_absent ? "does not answer"
                      : scene.fault == Fault::abort_absent || scene.fault == Fault::abort_waiting ? "abort"
                                                                                                  : "is lost";
  tally.check(report.status == MK_ERROR_REMOTE && report.error.rank == culprit && names(report, culprit),
              who + text("expected MK_ERROR_REMOTE, naming rank %d", culprit));
  tally.check(says(report, words), who + "does not say: " + words);
}

void check_rank(const Scene& scene, int rank, int nranks, const Board& board, int* num_timeouts) {
  const Report& report = board.reports[rank];
  const bool is_victim = rank == scene.victim;
  const std::string who =
      text("%s: rank %d (%s: %s): ", scene.name, rank, mk_status_string(report.status), report.sentence);
  const auto took_ms = report.ended_ms - board.struck_ms.load();
  const int aborter = scene.fault == Fault::abort_absent ? scene.victim : (scene.victim + 1) % nranks;
  const bool aborts =
      (scene.fault == Fault::abort_absent || scene.fault == Fault::abort_waiting) && rank == aborter;
  if (scene.fault == Fault::late) {
    tally.check(report.status == MK_SUCCESS, who + "a late rank is waited for");
  } else if (aborts) {
    tally.check(report.status == MK_ERROR_ABORTED, who + "expected MK_ERROR_ABORTED");
    tally.check(report.abort_ms >= 0 && report.abort_ms <= ABORT_WITHIN_MS,
                who + text("its abort took %d ms", report.abort_ms));
  } else if (scene.fault == Fault::slow && is_victim) {
    // Two-shot it waits itself, for sums that wait for its own part.
    tally.check(report.status == MK_ERROR_REMOTE || report.status == MK_ERROR_TIMEOUT,
                who + "expected MK_ERROR_REMOTE: others gave up");
  } else if (scene.fault == Fault::slow) {
    *num_timeouts += check_timeout(scene, rank, report, who);
  } else if (scene.fault == Fault::stop_absent && is_victim) {
    tally.check(report.status == MK_ERROR_REMOTE, who + "expected MK_ERROR_REMOTE: it was away");
  } else {
    check_remote(
        scene, report, who,
        scene.fault == Fault::abort_absent || scene.fault == Fault::abort_waiting ? aborter : scene.victim);
  }
  const bool has_own_pace = is_victim && (scene.fault == Fault::slow || scene.fault == Fault::stop_absent);
  if (scene.fault != Fault::late && !has_own_pace)
    tally.check(took_ms <= NAMED_WITHIN_MS,
                who + text("was told after %lld ms", static_cast<long long>(took_ms)));
  tally.check(report.idle, who + "the stream or the device did not recover");
  tally.check(
      report.destroyed == MK_SUCCESS && report.destroy_ms <= ABORT_WITHIN_MS,
      who + text("mk_comm_destroy: %s after %d ms", mk_status_string(report.destroyed), report.destroy_ms));
  tally.check(report.second == MK_SUCCESS, who + "the second communicator: " + mk_status_string(report.second) +
                                               ": " + report.second_sentence);
  tally.check(report.wrong == 0, who + text("%llu wrong elements", report.wrong));
}

// Waits for a process at most until `end`.
bool reap(pid_t process, int64_t end, int* status) {
  return eventually(static_cast<int>(std::max<int64_t>(0, end - now_ms())),
                    [&] { return waitpid(process, status, WNOHANG) == process; });
}

void run_scene(const Scene& scene, int nranks, int num_devices) {
  const int64_t begin = now_ms();
  void* shared = mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (!tally.check(shared != MAP_FAILED, "no shared memory for the test")) return;
  Board& board = *new (shared) Board{};
  std::fflush(stdout);
  std::vector<pid_t> processes;
  for (int rank = 0; rank < nranks; ++rank) {
    const pid_t process = fork();
    if (process == 0) {
      alarm(SCENE_SECONDS);
      RankProcess(board, scene, rank, nranks, num_devices).run();
      std::_Exit(0);
    }
    processes.push_back(process);
  }
  const int64_t end = begin + (SCENE_SECONDS - 10) * 1000;
  const pid_t victim = processes[scene.victim];
  const bool kills = scene.fault == Fault::kill_absent || scene.fault == Fault::kill_running;
  const bool stops = scene.fault == Fault::stop_absent;
  const bool ready = eventually(SCENE_SECONDS * 500, [&] { return board.num_ready.load() == nranks; });
  if (ready && (kills || stops)) {
    usleep(static_cast<useconds_t>(scene.delay_ms) * 1000);
    kill(victim, kills ? SIGKILL : SIGSTOP);
    board.struck_ms.store(now_ms());
  }
  if (ready && stops) {
    eventually(60000, [&] {
      int num_reported = 0;
      for (int rank = 0; rank < nranks; ++rank) num_reported += board.reported[rank].load();
      return num_reported >= nranks - 1;
    });
    kill(victim, SIGCONT);
  }
  int num_timeouts = 0;
  for (int rank = 0; rank < nranks; ++rank) {
    int status = 0;
    if (!reap(processes[rank], end, &status)) {
      tally.check(false, text("%s: rank %d does not end; it is at: %s", scene.name, rank, board.stages[rank]));
      kill(processes[rank], SIGKILL);
      reap(processes[rank], now_ms() + 5000, &status);
      continue;
    }
    if (kills && rank == scene.victim) continue;
    if (board.reported[rank].load(std::memory_order_acquire) == 0) {
      tally.check(false, text("%s: rank %d ended with wait status %d at: %s", scene.name, rank, status,
                              board.stages[rank]));
      continue;
    }
    check_rank(scene, rank, nranks, board, &num_timeouts);
  }
  if (scene.fault == Fault::slow)
    tally.check(num_timeouts > 0, std::string(scene.name) + ": nobody's wait ended");
  tally.say(text("%s: %lld ms", scene.name, static_cast<long long>(now_ms() - begin)));
  munmap(shared, sizeof(Board));
}

std::vector<Scene> make_scenes(int nranks, bool quick) {
  const Problem gather{.op = MK_OPERATOR_ALLGATHER_GEMM, .m = 1000, .n = 520, .k = 328};
  const Problem scatter{.op = MK_OPERATOR_GEMM_REDUCE_SCATTER, .m = 1000, .n = 520, .k = 328};
  const Problem one_shot{
      .op = MK_OPERATOR_GEMM_ALLREDUCE, .m = 16, .n = 520, .k = 328, .algorithm = MK_ALGORITHM_ONE_SHOT};
  const Problem two_shot{
      .op = MK_OPERATOR_GEMM_ALLREDUCE, .m = 1000, .n = 520, .k = 328, .algorithm = MK_ALGORITHM_TWO_SHOT};
  // One row a rank and one column, so that a slow product needs little memory.
  const Problem column{.op = MK_OPERATOR_GEMM_REDUCE_SCATTER,
                       .m = nranks,
                       .n = 1,
                       .k = 64,
                       .transposed = true,
                       .out = MK_DTYPE_FP32};
  Problem one_column = column, two_column = column;
  one_column.op = two_column.op = MK_OPERATOR_GEMM_ALLREDUCE;
  one_column.algorithm = MK_ALGORITHM_ONE_SHOT, two_column.algorithm = MK_ALGORITHM_TWO_SHOT;
  const auto large = [](Problem problem) {
    problem.m = 4096, problem.n = 2048, problem.k = 2048;
    return problem;
  };
  const int last = nranks - 1;
  const int late_ms = 5 * WAIT_TIMEOUT_MS;
  std::vector<Scene> scenes = {
      {"AG+GEMM, a late rank", Fault::late, gather, last, late_ms},
      {"GEMM+AR two-shot, a late rank", Fault::late, two_shot, 0, late_ms},
      {"GEMM+RS, an absent rank aborts", Fault::abort_absent, scatter, last, 1500},
      {"AG+GEMM, a waiting rank aborts", Fault::abort_waiting, gather, 0, 500},
      {"AG+GEMM, an absent rank is killed", Fault::kill_absent, gather, last, 500},
      {"GEMM+RS, an absent rank is stopped", Fault::stop_absent, scatter, last, 500},
      {"GEMM+RS, a slow rank", Fault::slow, column, last, 0},
      {"GEMM+AR one-shot, a slow rank", Fault::slow, one_column, 0, 0},
      {"AG+GEMM, a rank killed in mid-flight", Fault::kill_running, large(gather), last, 37},
      {"GEMM+AR two-shot, rank 0 killed in mid-flight", Fault::kill_running, large(two_shot), 0, 81},
  };
  if (quick) return scenes;
  const std::vector<Scene> more = {
      {"GEMM+RS, a late rank", Fault::late, scatter, 0, late_ms},
      {"GEMM+AR one-shot, a late rank", Fault::late, one_shot, last, late_ms},
      {"AG+GEMM, an absent rank aborts", Fault::abort_absent, gather, 0, 800},
      {"GEMM+AR one-shot, a waiting rank aborts", Fault::abort_waiting, one_shot, last, 500},
      {"GEMM+AR two-shot, rank 0 is killed, absent", Fault::kill_absent, two_shot, 0, 500},
      {"GEMM+AR two-shot, a slow rank", Fault::slow, two_column, last, 0},
      {"GEMM+RS, a rank killed in mid-flight", Fault::kill_running, large(scatter), last, 12},
      {"GEMM+RS, rank 0 killed in mid-flight", Fault::kill_running, large(scatter), 0, 153},
      {"GEMM+AR one-shot, a rank killed in mid-flight", Fault::kill_running, one_shot, last, 60},
  };
  scenes.insert(scenes.end(), more.begin(), more.end());
  return scenes;
}

// In a process of its own: one that has used CUDA cannot fork ranks.
int count_devices() {
  const pid_t process = fork();
  if (process == 0) std::_Exit(require_devices());
  int status = 0;
  if (process < 0 || !reap(process, now_ms() + 60000, &status) || !WIFEXITED(status)) return 0;
  return WEXITSTATUS(status) == 77 ? 0 : WEXITSTATUS(status);
}

}  // namespace

int main(int argc, char** argv) {
  set_environment();
  const Options options = read_options(argc, argv);
  const int num_devices = count_devices();
  if (num_devices == 0) {
    std::printf("skipped: no GPU of compute capability 9.0\n");
    return 77;
  }
  const int nranks = std::min(MAX_RANKS, options.nranks > 0 ? options.nranks : std::max(2, num_devices));
  if (nranks < 2) {
    std::printf("skipped: a fault needs two ranks\n");
    return 77;
  }
  if (nranks > num_devices) setenv("MK_SHARE_GPU", "1", 1);
  for (const Scene& scene : make_scenes(nranks, options.quick)) run_scene(scene, nranks, num_devices);
  return tally.finish();
}
