// SPDX-License-Identifier: MIT
// Right arguments at the wrong moment: after the end, from two threads, unprepared where preparing is not
// allowed.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>

#include "test/multi_rank/bad_arguments.h"
#include "test/multi_rank/exact_call.h"
#include "test/support/catch.h"

using namespace mk::test;

namespace {

void check_invalid_handles(mk_comm_t comm) {
  for (const BadCall& call : bad_handle_calls()) {
    const mk_status_t status = call.call(comm);
    INFO(call.name << ": " << mk_get_last_error(nullptr));
    CHECK(status == MK_ERROR_INVALID_HANDLE);
    for (const std::string& text : call.says)
      CHECK(std::string(mk_get_last_error(nullptr)).find(text) != std::string::npos);
  }
}

std::vector<Outcome> run_good_call(ThreadJob& job, uint64_t seed) {
  std::vector<std::string> wrong(static_cast<size_t>(job.nranks()));
  auto outcomes = job.each([&](int rank, mk_comm_t comm) {
    ExactCall call(MK_OPERATOR_ALLGATHER_GEMM, job.nranks(), rank, seed, 40, 16, 32);
    return run_exact_call(comm, call, wrong[static_cast<size_t>(rank)]);
  });
  for (const std::string& text : wrong) {
    if (!text.empty()) outcomes[0] = {MK_ERROR_INTERNAL, text};
  }
  return outcomes;
}

}  // namespace

TEST_CASE("handles of communicators that are gone") {
  std::vector<mk_comm_t> gone;
  {
    ThreadJob job(JobOptions(node_layout(2, 1)));
    REQUIRE(failures(job.started()) == "");
    gone = {job.comm(0), job.comm(1)};
    REQUIRE(all_answer(job.finalize(), MK_SUCCESS));
    REQUIRE(all_answer(job.destroy(), MK_SUCCESS));
  }
  for (mk_comm_t comm : gone) check_invalid_handles(comm);
  // Others in the same places do not answer to the old names.
  ThreadJob job(JobOptions(node_layout(2, 2)));
  REQUIRE(failures(job.started()) == "");
  for (mk_comm_t comm : gone) {
    CHECK((comm != job.comm(0) && comm != job.comm(1)));
    check_invalid_handles(comm);
  }
  CHECK(all_answer(run_good_call(job, 1), MK_SUCCESS));
  CHECK(all_answer(job.finalize(), MK_SUCCESS));
}

TEST_CASE("after mk_comm_finalize only mk_comm_destroy is left") {
  ThreadJob job(JobOptions(node_layout(2, 1)));
  REQUIRE(failures(job.started()) == "");
  REQUIRE(all_answer(job.finalize(), MK_SUCCESS));
  const auto late = [&](const ThreadJob::Call& call) {
    const Outcome outcome = job.on(1, call);
    INFO(text_of(outcome));
    CHECK(outcome.status == MK_ERROR_INVALID_HANDLE);
    CHECK(outcome.says("finalized"));
  };
  late([](int, mk_comm_t comm) {
    ExactCall call(MK_OPERATOR_GEMM_ALLREDUCE, 2, 1, 1);
    return call.launch(comm);
  });
  late([](int, mk_comm_t comm) {
    mk_gemm_maxima_t maxima = MK_GEMM_MAXIMA_INIT;
    return mk_allgather_gemm_prepare(comm, &maxima);
  });
  late([](int, mk_comm_t comm) {
    void* memory = nullptr;
    return mk_mem_alloc(comm, 64, &memory);
  });
  late([](int, mk_comm_t comm) { return mk_comm_finalize(comm); });
  CHECK(all_answer(job.destroy(), MK_SUCCESS));
}

TEST_CASE("two threads in one communicator") {
  const int nranks = 2;
  ThreadJob job(JobOptions(node_layout(nranks, 1)));
  REQUIRE(failures(job.started()) == "");
  // Rank 0 waits in mk_mem_alloc until rank 1 comes too.
  void* memory[2] = {nullptr, nullptr};
  mk_status_t first = MK_ERROR_INTERNAL;
  const auto give_up = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  std::thread inside([&] {
    do {  // the looks of the other thread below keep this one out, too
      first = mk_mem_alloc(job.comm(0), 256, &memory[0]);
    } while (first == MK_ERROR_BUSY && std::chrono::steady_clock::now() < give_up);
  });
  mk_comm_info_t info = MK_COMM_INFO_INIT;
  while (mk_comm_get_info(job.comm(0), &info) != MK_ERROR_BUSY && std::chrono::steady_clock::now() < give_up)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  mk_async_error_t error = MK_ASYNC_ERROR_INIT;
  CHECK(mk_comm_get_async_error(job.comm(0), &error) == MK_SUCCESS);
  CHECK(error.status == MK_SUCCESS);
  for (const BadCall& call : bad_handle_calls()) {
    const bool any_thread = call.name == "mk_comm_abort" || call.name == "mk_comm_get_async_error" ||
                            call.name == "mk_comm_get_flight_record";
    if (any_thread) continue;
    const mk_status_t status = call.call(job.comm(0));
    INFO(call.name << ": " << mk_get_last_error(job.comm(0)));
    CHECK(status == MK_ERROR_BUSY);
    CHECK(std::string(mk_get_last_error(job.comm(0))).find("another thread") != std::string::npos);
  }
  CHECK(mk_mem_alloc(job.comm(1), 256, &memory[1]) == MK_SUCCESS);
  inside.join();
  CHECK(first == MK_SUCCESS);
  CHECK(memory[0] != nullptr);
  CHECK(all_answer(run_good_call(job, 2), MK_SUCCESS));
  CHECK(all_answer(job.finalize(), MK_SUCCESS));
}

// Whoever finds the communicator and enters it when the other thread has destroyed it is told so.
TEST_CASE("calls while another thread destroys the communicator") {
  for (int turn = 0; turn < 40; ++turn) {
    mk_unique_id_t id;
    REQUIRE(mk_get_unique_id(&id) == MK_SUCCESS);
    mk_comm_t comm = nullptr;
    mk_comm_config_t config = MK_COMM_CONFIG_INIT;
    config.device = MK_DEVICE_HOST;
    config.host_threads = 1;
    REQUIRE(mk_comm_init(&comm, &id, 1, 0, &config) == MK_SUCCESS);
    std::atomic<int> begun{0};
    std::atomic<int> unexpected{0};
    std::vector<std::thread> callers;
    for (int caller = 0; caller < 3; ++caller) {
      callers.emplace_back([&, caller] {
        ++begun;
        mk_status_t status = MK_SUCCESS;
        while (status == MK_SUCCESS || status == MK_ERROR_BUSY) {
          if (status == MK_ERROR_BUSY) std::this_thread::yield();
          mk_comm_info_t info = MK_COMM_INFO_INIT;
          mk_allgather_gemm_args_t args = MK_ALLGATHER_GEMM_ARGS_INIT;
          args.m = args.n = args.k = 64;
          mk_plan_t plan = MK_PLAN_INIT;
          status = caller == 0   ? mk_comm_get_info(comm, &info)
                   : caller == 1 ? mk_allgather_gemm_plan(comm, &args, &plan)
                                 : mk_comm_synchronize(comm, nullptr);
        }
        if (status != MK_ERROR_INVALID_HANDLE) ++unexpected;
      });
    }
    while (begun < 3) std::this_thread::yield();
    mk_status_t status = MK_ERROR_BUSY;
    while (status == MK_ERROR_BUSY) status = mk_comm_destroy(comm);
    CHECK(status == MK_SUCCESS);
    for (std::thread& caller : callers) caller.join();
    CHECK(unexpected == 0);
  }
}

TEST_CASE("a communicator in the child of a fork") {
  const int num_nodes = GENERATE(1, 2);
  ThreadJob job(JobOptions(node_layout(2, num_nodes)));
  REQUIRE(failures(job.started()) == "");
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    for (const BadCall& call : bad_handle_calls()) {
      if (call.call(job.comm(0)) != MK_ERROR_INVALID_HANDLE) _exit(1);
    }
    _exit(0);
  }
  REQUIRE(child > 0);
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  INFO("wait status " << status);
  CHECK((WIFEXITED(status) && WEXITSTATUS(status) == 0));
  CHECK(all_answer(run_good_call(job, 5), MK_SUCCESS));
  CHECK(all_answer(job.finalize(), MK_SUCCESS));
}

TEST_CASE("require_prepare") {
  JobOptions options(node_layout(3, 2));
  options.config.require_prepare = 1;
  ThreadJob job(options);
  REQUIRE(failures(job.started()) == "");
  for (int turn = 0; turn < 3; ++turn) {
    // One rank alone gets the answer too.
    const Outcome alone = job.on(turn, [](int rank, mk_comm_t comm) {
      ExactCall call(MK_OPERATOR_ALLGATHER_GEMM, 3, rank, 1, 40, 16, 32);
      return call.launch(comm);
    });
    INFO(text_of(alone));
    CHECK(alone.status == MK_ERROR_NOT_PREPARED);
    CHECK(alone.says("require_prepare"));
    CHECK(alone.says("mk_allgather_gemm_prepare"));
    CHECK(alone.says("m=40"));
  }
  REQUIRE(all_answer(job.each([](int, mk_comm_t comm) {
    mk_gemm_maxima_t maxima = MK_GEMM_MAXIMA_INIT;
    maxima.m = 40, maxima.n = 16, maxima.k = 32;
    return mk_allgather_gemm_prepare(comm, &maxima);
  }),
                     MK_SUCCESS));
  CHECK(all_answer(run_good_call(job, 3), MK_SUCCESS));
  const Outcome larger = job.on(0, [](int rank, mk_comm_t comm) {
    ExactCall call(MK_OPERATOR_ALLGATHER_GEMM, 3, rank, 1, 41, 16, 32);
    return call.launch(comm);
  });
  CHECK(larger.status == MK_ERROR_NOT_PREPARED);
  CHECK(larger.says("m=41"));
  CHECK(all_answer(run_good_call(job, 4), MK_SUCCESS));
  CHECK(all_answer(job.finalize(), MK_SUCCESS));
}
