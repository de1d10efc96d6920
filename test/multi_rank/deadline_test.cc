// SPDX-License-Identifier: MIT
// A rank that has entered a launch and does not go on: the deadline of a wait, and an abort meanwhile.
#include <chrono>

#include "kernels/host/hooks.h"
#include "test/multi_rank/exact_call.h"
#include "test/multi_rank/thread_job.h"
#include "test/support/catch.h"
#include "test/support/log_lines.h"

using namespace mk::test;

namespace {

using Clock = std::chrono::steady_clock;

// Holds back everything that `held` sends, for as long as it lives.
class Hold {
 public:
  explicit Hold(int held) {
    hooks_.hold = [held](int rank, int, int) { return rank == held; };
    mk::host_hooks.store(&hooks_, std::memory_order_release);
  }
  Hold(const Hold&) = delete;
  Hold& operator=(const Hold&) = delete;
  ~Hold() { mk::host_hooks.store(nullptr, std::memory_order_release); }

 private:
  mk::HostHooks hooks_;
};

struct Ended {
  Outcome outcome;
  mk_async_error_t error = MK_ASYNC_ERROR_INIT;
  double seconds = 0;
};

// A launch on every rank.
std::vector<Ended> run(ThreadJob& job, mk_operator_t op, mk_allgather_mode_t mode = MK_ALLGATHER_FORWARD) {
  std::vector<Ended> ended(static_cast<size_t>(job.nranks()));
  const auto start = Clock::now();
  const auto outcomes = job.each([&](int rank, mk_comm_t comm) {
    Ended& own = ended[static_cast<size_t>(rank)];
    ExactCall call(op, job.nranks(), rank, 3, 40, 16, 32, mode);
    std::string wrong;
    const mk_status_t status = run_exact_call(comm, call, wrong);
    own.seconds = std::chrono::duration<double>(Clock::now() - start).count();
    mk_comm_get_async_error(comm, &own.error);
    return status;
  });
  for (size_t rank = 0; rank < outcomes.size(); ++rank) ended[rank].outcome = outcomes[rank];
  return ended;
}

// The sentence and mk_async_error_t tell the same: who waited, in what, for what, how long, and what to do.
void check_report(const Ended& own, mk_operator_t op, int rank, int64_t timeout_ms) {
  const mk_async_error_t& error = own.error;
  CHECK(own.outcome.status == MK_ERROR_TIMEOUT);
  CHECK(error.status == MK_ERROR_TIMEOUT);
  CHECK(error.waiter_rank == rank);
  CHECK(error.op == op);
  CHECK(error.epoch == 1);
  CHECK(std::string(error.role) != "");
  CHECK(std::string(error.object) != "");
  CHECK(error.seen < error.expected);
  static constexpr const char* kNames[] = {"", "allgather_gemm", "gemm_reduce_scatter", "gemm_allreduce"};
  const std::string expected =
      "rank " + std::to_string(rank) + ", role " + error.role + ", waited " + std::to_string(timeout_ms) +
      " ms in " + kNames[op] + " (launch 1) for " + error.object + " " + std::to_string(error.object_index) +
      " of rank " + std::to_string(error.rank) + ": saw " + std::to_string(error.seen) + ", expected " +
      std::to_string(error.expected) +
      ". That rank has entered the launch but does not go on; look at its own error, or raise wait_timeout_ms";
  CHECK(own.outcome.sentence == expected);
}

// The flight recorder has the launch.
void check_flight(mk_comm_t comm, mk_operator_t op, bool failed) {
  mk_flight_entry_t entry{};
  size_t count = 0;
  REQUIRE(mk_comm_get_flight_record(comm, &entry, 1, &count) == MK_SUCCESS);
  REQUIRE(count == 1);
  CHECK(entry.epoch == 1);
  CHECK(entry.op == op);
  CHECK(entry.state == (failed ? 3 : 2));
  CHECK(entry.shape[0] == 40);
  CHECK(entry.shape[1] == 16);
  CHECK(entry.shape[2] == 32);
  CHECK((entry.duration_us >= 200000 || !failed));
}

}  // namespace

TEST_CASE("a chunk held back beyond wait_timeout_ms") {
  const int num_nodes = GENERATE(1, 2);
  const auto op = static_cast<mk_operator_t>(GENERATE(1, 2, 3));
  constexpr int kRanks = 4, kHeld = 2;
  JobOptions options(node_layout(kRanks, num_nodes));
  options.config.wait_timeout_ms = 400;
  // What is held must be gone before the hooks are: the job is destroyed first.
  const Hold hold(kHeld);
  ThreadJob job(options);
  REQUIRE(failures(job.started()) == "");
  const auto ended = run(job, op);
  int num_waiters = 0;
  for (int rank = 0; rank < kRanks; ++rank) {
    const Ended& own = ended[static_cast<size_t>(rank)];
    INFO("operator " << op << ", nodes " << num_nodes << ", rank " << rank << ": " << text_of(own.outcome)
                     << "; waiter " << own.error.waiter_rank << ", blamed " << own.error.rank << ", role "
                     << own.error.role << ", object " << own.error.object);
    CHECK(own.seconds < 10);
    CHECK(own.error.status == own.outcome.status);
    if (own.outcome.status == MK_ERROR_REMOTE) {
      CHECK(own.error.rank >= 0);
      CHECK(own.outcome.says("rank " + std::to_string(own.error.rank)));
      continue;
    }
    CHECK(own.outcome.status == MK_ERROR_TIMEOUT);
    ++num_waiters;
    CHECK(own.error.waiter_rank == rank);
    CHECK(own.error.op == op);
    CHECK(own.error.epoch == 1);
    // The held rank may be the first whose patience ends; what it waits for then is the hook.
    if (rank != kHeld) CHECK(own.error.seen < own.error.expected);
    CHECK(std::string(own.error.role) != "");
    CHECK(std::string(own.error.object) != "");
    CHECK(own.outcome.says("rank " + std::to_string(rank) + ", role " + own.error.role));
    CHECK(own.outcome.says(std::string(own.error.object) + " " + std::to_string(own.error.object_index)));
    CHECK(own.outcome.says("saw " + std::to_string(own.error.seen)));
    CHECK(own.outcome.says("expected " + std::to_string(own.error.expected)));
    CHECK(own.outcome.says("400 ms"));
    if (rank != kHeld) CHECK(own.outcome.says("of rank " + std::to_string(own.error.rank)));
    if (op == MK_OPERATOR_ALLGATHER_GEMM && rank != kHeld) {
      CHECK(std::string(own.error.object) == "chunk");
      CHECK(own.error.rank == kHeld);
      const std::string role = own.error.role;
      CHECK((role == "compute" || role == "copy" || role == "receive"));
    }
  }
  CHECK(num_waiters >= 1);
  // The error ends the communicator: later calls return the same status, and it cannot be cleared.
  for (int rank = 0; rank < kRanks; ++rank) {
    const mk_status_t status = ended[static_cast<size_t>(rank)].outcome.status;
    ExactCall call(op, kRanks, rank, 3);
    CHECK(call.launch(job.comm(rank)) == status);
    CHECK(mk_comm_synchronize(job.comm(rank), nullptr) == status);
    void* memory = nullptr;
    CHECK(mk_mem_alloc(job.comm(rank), 64, &memory) == status);
    CHECK(mk_comm_clear_async_error(job.comm(rank)) == MK_ERROR_INVALID_ARGUMENT);
    CHECK(mk_comm_finalize(job.comm(rank)) == status);
  }
  CHECK(all_answer(job.destroy(), MK_SUCCESS));
}

namespace {

// A transfer that is held back for good, and the wait that must report it when deadlines count on `waiter`
// alone.
struct Missing {
  const char* name;
  mk_operator_t op;
  mk_allgather_mode_t mode;
  std::vector<int32_t> nodes;
  int holder, source;  // this rank holds the chunks of that one (of that owner, in a reduction)
  int waiter;
  std::string role;
  std::string object;
  int peer;
};

std::vector<Missing> missing_objects() {
  constexpr auto kForward = MK_ALLGATHER_FORWARD;
  constexpr auto kGather = MK_OPERATOR_ALLGATHER_GEMM;
  constexpr auto kScatter = MK_OPERATOR_GEMM_REDUCE_SCATTER;
  constexpr auto kReduce = MK_OPERATOR_GEMM_ALLREDUCE;
  const std::vector<int32_t> one = {0, 0, 0}, two = {0, 0, 1, 1};
  return {
      {"a chunk inside the node", kGather, kForward, one, 1, 1, 0, "compute", "chunk", 1},
      {"a chunk of another node, at its relay", kGather, kForward, two, 2, 2, 0, "receive", "chunk", 2},
      {"a chunk of another node, behind its relay", kGather, kForward, two, 2, 2, 1, "compute", "chunk", 2},
      {"a chunk that its relay holds", kGather, kForward, two, 0, 2, 1, "compute", "chunk", 2},
      {"a chunk in mode WGRAD", kGather, MK_ALLGATHER_WGRAD, one, 1, 1, 0, "compute", "chunk", 1},
      {"a chunk of another node in mode WGRAD", kGather, MK_ALLGATHER_WGRAD, two, 3, 3, 0, "compute", "chunk",
       3},
      {"a partial", kScatter, kForward, one, 1, 0, 0, "reduce", "partial", 1},
      {"a partial for an owner elsewhere", kScatter, kForward, two, 2, 1, 3, "reduce", "partial", 2},
      {"a node sum", kScatter, kForward, two, 2, 1, 1, "reduce", "node sum", 3},
      {"a partial of the all-reduce", kReduce, kForward, one, 1, 0, 0, "reduce", "partial", 1},
      {"a node sum of the all-reduce", kReduce, kForward, two, 2, 1, 1, "reduce", "node sum", 3},
      {"a finished chunk of the all-reduce", kReduce, kForward, one, 1, 0, 2, "copy", "reduced chunk", 0},
      {"a finished chunk from another node", kReduce, kForward, two, 0, 1, 3, "receive", "reduced chunk", 1},
  };
}

}  // namespace

TEST_CASE("the report of a wait names the waiter and what it waited for") {
  for (const Missing& missing : missing_objects()) {
    INFO(missing.name);
    const int nranks = static_cast<int>(missing.nodes.size());
    mk::HostHooks hooks;
    hooks.has_deadline = [&](int rank, const char* role) {
      return rank == missing.waiter && role == missing.role;
    };
    hooks.hold = [&](int rank, int source, int) { return rank == missing.holder && source == missing.source; };
    mk::host_hooks.store(&hooks, std::memory_order_release);
    {
      JobOptions options(missing.nodes);
      options.config.wait_timeout_ms = 250;
      ThreadJob job(options);
      REQUIRE(failures(job.started()) == "");
      const auto ended = run(job, missing.op, missing.mode);
      for (int rank = 0; rank < nranks; ++rank) {
        const Ended& own = ended[static_cast<size_t>(rank)];
        INFO("rank " << rank << ": " << text_of(own.outcome));
        if (rank == missing.waiter) {
          check_report(own, missing.op, rank, 250);
          CHECK(own.error.role == missing.role);
          CHECK(own.error.object == missing.object);
          CHECK(own.error.rank == missing.peer);
          CHECK(own.error.object_index == 0);
        } else if (own.outcome.status != MK_SUCCESS) {  // a rank that needs nothing of it completes the launch
          CHECK(own.outcome.status == MK_ERROR_REMOTE);
          CHECK(own.error.rank == missing.waiter);
          CHECK(own.outcome.says("rank " + std::to_string(missing.waiter) + " aborted: rank " +
                                 std::to_string(missing.waiter) + ", role "));
        }
        check_flight(job.comm(rank), missing.op, own.outcome.status != MK_SUCCESS);
      }
      CHECK(all_answer(job.destroy(), MK_SUCCESS));
    }
    mk::host_hooks.store(nullptr, std::memory_order_release);
  }
}

TEST_CASE("a peer that has not entered is waited for beyond wait_timeout_ms") {
  JobOptions options(node_layout(3, GENERATE(1, 3)));
  options.config.wait_timeout_ms = 100;
  const LogLines lines(MK_LOG_WARN);
  ThreadJob job(options);
  REQUIRE(failures(job.started()) == "");
  std::vector<std::string> wrong(3);
  const auto outcomes = job.each([&](int rank, mk_comm_t comm) {
    mk_gemm_maxima_t maxima = MK_GEMM_MAXIMA_INIT;
    maxima.m = 64, maxima.n = 64, maxima.k = 64;
    if (const mk_status_t status = mk_gemm_reduce_scatter_prepare(comm, &maxima); status != MK_SUCCESS)
      return status;
    if (rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(900));
    ExactCall call(MK_OPERATOR_GEMM_REDUCE_SCATTER, 3, rank, 5);
    return run_exact_call(comm, call, wrong[static_cast<size_t>(rank)]);
  });
  INFO(text_of(outcomes));
  CHECK(all_answer(outcomes, MK_SUCCESS));
  CHECK(wrong == std::vector<std::string>(3));
  // Those that waited have told the log for whom, once.
  for (const int waiter : {0, 2}) {
    CHECK(lines.count({"rank " + std::to_string(waiter) + " has",
                       " waited 100 ms in gemm_reduce_scatter (launch 1) for rank 1 (its "
                       "last launch: 0) to enter it, and goes on waiting"}) == 1);
  }
  CHECK(lines.count({" to enter it"}) == 2);
  CHECK(all_answer(job.finalize(), MK_SUCCESS));
}

TEST_CASE("an abort while a chunk is held back") {
  const int num_nodes = GENERATE(1, 2);
  const auto op = static_cast<mk_operator_t>(GENERATE(1, 2, 3));
  const Hold hold(1);
  ThreadJob job(JobOptions(node_layout(3, num_nodes)));
  REQUIRE(failures(job.started()) == "");
  const int aborter = static_cast<int>(op) - 1;
  double abort_seconds = 0;
  mk_status_t aborted = MK_ERROR_INTERNAL;
  std::thread other([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    const auto start = Clock::now();
    aborted = mk_comm_abort(job.comm(aborter));
    abort_seconds = std::chrono::duration<double>(Clock::now() - start).count();
  });
  const auto ended = run(job, op);
  other.join();
  CHECK(aborted == MK_SUCCESS);
  CHECK(abort_seconds < 5);
  for (int rank = 0; rank < 3; ++rank) {
    const Ended& own = ended[static_cast<size_t>(rank)];
    INFO("operator " << op << ", nodes " << num_nodes << ", rank " << rank << ": " << text_of(own.outcome));
    CHECK(own.seconds < 10);
    CHECK(own.outcome.status == (rank == aborter ? MK_ERROR_ABORTED : MK_ERROR_REMOTE));
    CHECK(own.outcome.says("rank " + std::to_string(aborter)));
    if (rank != aborter) CHECK(own.error.rank == aborter);
  }
  CHECK(all_answer(job.destroy(), MK_SUCCESS));
}
