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

#include "operators_fault_rank.h"

namespace {

using namespace operators;

constexpr int NAMED_WITHIN_MS = 10000;
constexpr int ABORT_WITHIN_MS = 5000;
constexpr int SCENE_SECONDS = 150;

Tally tally;

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

// The CTA that a sentence names, -1 if none.
int cta_of(const Report& report) {
  const char* const words = ", CTA ";
  const char* const at = std::strstr(report.sentence, words);
  return at != nullptr ? std::atoi(at + std::strlen(words)) : -1;
}

// The report of a wait, word for word.
std::string timeout_sentence(const Report& report, const Scene& scene, int rank) {
  const char* operators[] = {"", "allgather_gemm", "gemm_reduce_scatter", "gemm_allreduce"};
  const mk_async_error_t& error = report.error;
  return text(
      "rank %d, role %s, CTA %d, waited %d ms in %s (launch %llu) for %s %llu of rank %d: saw %llu, expected "
      "%llu. That rank has entered the launch but does not go on; look at its own error, or raise "
      "wait_timeout_ms",
      rank, error.role, cta_of(report), WAIT_TIMEOUT_MS, operators[scene.problem.op],
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
  tally.check(report.flight.epoch == 2 && report.flight.state == 3,
              who + text("launch %llu is the last in the flight record, in state %d, where 2 has failed (3)",
                         static_cast<unsigned long long>(report.flight.epoch), report.flight.state));
  const std::string role = error.role, object = error.object;
  const bool waits_for_victim = role == "reduce" && object == "partial" && error.rank == scene.victim;
  const bool is_two_shot = scene.problem.algorithm == MK_ALGORITHM_TWO_SHOT;
  // Two-shot, finished rows are gathered from every owner, this rank included.
  const bool waits_for_owner = is_two_shot && role == "gather" && object.rfind("reduced ", 0) == 0;
  tally.check(waits_for_victim || waits_for_owner,
              who + "role " + role + ", object " + object + text(", rank %d", error.rank));
  // What a rank sums is one unit, which the first CTA takes.
  const int cta = cta_of(report);
  tally.check(role == "reduce" ? cta == 0 : cta >= 0, who + text("CTA %d", cta));
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
