// SPDX-License-Identifier: MIT
// A rank that has entered a launch and does not go on: the deadline of a wait, and an abort meanwhile.
#include <chrono>

#include "kernels/host/hooks.h"
#include "test/multi_rank/exact_call.h"
#include "test/multi_rank/thread_job.h"
#include "test/support/catch.h"

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
std::vector<Ended> run(ThreadJob& job, mk_operator_t op) {
  std::vector<Ended> ended(static_cast<size_t>(job.nranks()));
  const auto start = Clock::now();
  const auto outcomes = job.each([&](int rank, mk_comm_t comm) {
    Ended& own = ended[static_cast<size_t>(rank)];
    ExactCall call(op, job.nranks(), rank, 3, 40, 16, 32);
    std::string wrong;
    const mk_status_t status = run_exact_call(comm, call, wrong);
    own.seconds = std::chrono::duration<double>(Clock::now() - start).count();
    mk_comm_get_async_error(comm, &own.error);
    return status;
  });
  for (size_t rank = 0; rank < outcomes.size(); ++rank) ended[rank].outcome = outcomes[rank];
  return ended;
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
  REQUIRE(all_answer(job.started(), MK_SUCCESS));
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

TEST_CASE("a peer that has not entered is waited for beyond wait_timeout_ms") {
  JobOptions options(node_layout(3, GENERATE(1, 3)));
  options.config.wait_timeout_ms = 100;
  ThreadJob job(options);
  REQUIRE(all_answer(job.started(), MK_SUCCESS));
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
  CHECK(all_answer(job.finalize(), MK_SUCCESS));
}

TEST_CASE("an abort while a chunk is held back") {
  const int num_nodes = GENERATE(1, 2);
  const auto op = static_cast<mk_operator_t>(GENERATE(1, 2, 3));
  const Hold hold(1);
  ThreadJob job(JobOptions(node_layout(3, num_nodes)));
  REQUIRE(all_answer(job.started(), MK_SUCCESS));
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
