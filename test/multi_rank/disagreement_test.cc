// SPDX-License-Identifier: MIT
// Ranks that do not do the same: every rank gets MK_ERROR_MISMATCH naming two of them, at once where they meet,
// asynchronously where they have launched; and the communicator goes on.
#include <cstdio>
#include <random>
#include <set>

#include "test/multi_rank/exact_call.h"
#include "test/multi_rank/thread_job.h"
#include "test/support/catch.h"

using namespace mk::test;

// Ranks that launch different shapes lay the receive areas out differently, and so write to the same places
// until they find out. That race is theirs: the outputs of such a launch are undefined. The areas are written
// and read by the functions of these files; what the launches after it compute is compared bit by bit below.
extern "C" __attribute__((visibility("default"))) const char* __tsan_default_suppressions();
extern "C" const char* __tsan_default_suppressions() {
  return "race:kernels/ops/\nrace:region_table.cc\nrace:loopback.cc\nrace:tile_gemm.cc\n";
}

namespace {

constexpr int64_t kM = 60, kN = 16, kK = 32;

// What a rank does; `odd` on the one that differs. Launches are waited for: the status is that of the first
// call that fails.
struct Disagreement {
  const char* name;
  std::function<mk_status_t(mk_comm_t comm, int rank, int nranks, bool odd)> act;
};

template <class Args>
mk_status_t launch(mk_comm_t comm, const Args& args) {
  mk_status_t status;
  if constexpr (std::is_same_v<Args, mk_allgather_gemm_args_t>) {
    status = mk_allgather_gemm(comm, &args, nullptr);
  } else if constexpr (std::is_same_v<Args, mk_gemm_reduce_scatter_args_t>) {
    status = mk_gemm_reduce_scatter(comm, &args, nullptr);
  } else {
    status = mk_gemm_allreduce(comm, &args, nullptr);
  }
  return status == MK_SUCCESS ? mk_comm_synchronize(comm, nullptr) : status;
}

// The same call everywhere but for what `change` does to the odd one's arguments.
template <class Args>
Disagreement launches(const char* name, mk_operator_t op, Args initial, std::function<void(Args&)> change,
                      int64_t m = kM) {
  return {name, [=](mk_comm_t comm, int rank, int nranks, bool odd) {
            ExactCall call(op, nranks, rank, 1, m, kN, kK);
            Args args = initial;
            call.fill(args);
            if (odd) change(args);
            return launch(comm, args);
          }};
}

Disagreement prepares(const char* name, std::function<void(mk_gemm_maxima_t&)> change) {
  return {name, [=](mk_comm_t comm, int, int, bool odd) {
            mk_gemm_maxima_t maxima = MK_GEMM_MAXIMA_INIT;
            maxima.m = 4096, maxima.n = 64, maxima.k = 64;
            if (odd) change(maxima);
            return mk_gemm_reduce_scatter_prepare(comm, &maxima);
          }};
}

// The odd one does `other`, the others launch a prepared call.
Disagreement one_elsewhere(const char* name, std::function<mk_status_t(mk_comm_t)> other) {
  return {name, [=](mk_comm_t comm, int rank, int nranks, bool odd) {
            if (odd) return other(comm);
            ExactCall call(MK_OPERATOR_ALLGATHER_GEMM, nranks, rank, 1, kM, kN, kK);
            mk_allgather_gemm_args_t args = MK_ALLGATHER_GEMM_ARGS_INIT;
            call.fill(args);
            return launch(comm, args);
          }};
}

mk_status_t allocate(mk_comm_t comm, size_t bytes) {
  void* memory = nullptr;
  return mk_mem_alloc(comm, bytes, &memory);
}

std::vector<Disagreement> at_meetings() {
  return {
      prepares("prepare, m", [](auto& maxima) { maxima.m = 8192; }),
      prepares("prepare, dtype", [](auto& maxima) { maxima.dtype = MK_DTYPE_FP16; }),
      prepares("prepare, comm_dtype", [](auto& maxima) { maxima.comm_dtype = MK_DTYPE_FP32; }),
      prepares("prepare, tuning",
               [](auto& maxima) {
                 static const mk_tuning_t tuning = {
                     sizeof(mk_tuning_t), MK_ALGORITHM_AUTO, 0, 0, 0, 0, 0, 32, 0, 0};
                 maxima.tuning = &tuning;
               }),
      {"prepare, operator",
       [](mk_comm_t comm, int, int, bool odd) {
         mk_gemm_maxima_t maxima = MK_GEMM_MAXIMA_INIT;
         maxima.m = 4096, maxima.n = 64, maxima.k = 64;
         return odd ? mk_gemm_allreduce_prepare(comm, &maxima) : mk_allgather_gemm_prepare(comm, &maxima);
       }},
      {"prepare, mode",
       [](mk_comm_t comm, int, int, bool odd) {
         mk_gemm_maxima_t maxima = MK_GEMM_MAXIMA_INIT;
         maxima.m = 4096, maxima.n = maxima.k = 64;
         if (odd) maxima.mode = MK_ALLGATHER_WGRAD;
         return mk_allgather_gemm_prepare(comm, &maxima);
       }},
      {"prepare and mk_mem_alloc",
       [](mk_comm_t comm, int, int, bool odd) {
         mk_gemm_maxima_t maxima = MK_GEMM_MAXIMA_INIT;
         maxima.m = 4096, maxima.n = 64, maxima.k = 64;
         return odd ? allocate(comm, 64) : mk_allgather_gemm_prepare(comm, &maxima);
       }},
      {"mk_mem_alloc, bytes",
       [](mk_comm_t comm, int, int, bool odd) { return allocate(comm, odd ? 4096 : 8192); }},
      {"mk_mem_alloc and mk_mem_register",
       [](mk_comm_t comm, int, int, bool odd) {
         static char buffer[64];
         mk_memory_t memory = nullptr;
         return odd ? mk_mem_register(comm, buffer, sizeof buffer, &memory) : allocate(comm, 256);
       }},
      {"mk_comm_finalize and mk_mem_alloc",
       [](mk_comm_t comm, int, int, bool odd) { return odd ? mk_comm_finalize(comm) : allocate(comm, 256); }},
      launches<mk_allgather_gemm_args_t>(
          "unprepared calls, m", MK_OPERATOR_ALLGATHER_GEMM, MK_ALLGATHER_GEMM_ARGS_INIT,
          [](auto& args) { args.m -= 1; }, 200),
      launches<mk_gemm_allreduce_args_t>(
          "unprepared calls, comm_dtype", MK_OPERATOR_GEMM_ALLREDUCE, MK_GEMM_ALLREDUCE_ARGS_INIT,
          [](auto& args) { args.comm_dtype = MK_DTYPE_FP32; }, 200),
  };
}

std::vector<Disagreement> at_launches() {
  static const mk_tuning_t tuning = {sizeof(mk_tuning_t), MK_ALGORITHM_AUTO, 0, 0, 0, 0, 0, 32, 0, 0};
  return {
      launches<mk_allgather_gemm_args_t>("m", MK_OPERATOR_ALLGATHER_GEMM, MK_ALLGATHER_GEMM_ARGS_INIT,
                                         [](auto& args) { args.m -= 1; }),
      launches<mk_allgather_gemm_args_t>("k", MK_OPERATOR_ALLGATHER_GEMM, MK_ALLGATHER_GEMM_ARGS_INIT,
                                         [](auto& args) { args.k -= 8; }),
      launches<mk_allgather_gemm_args_t>("no rows", MK_OPERATOR_ALLGATHER_GEMM, MK_ALLGATHER_GEMM_ARGS_INIT,
                                         [](auto& args) { args.m = 0; }),
      launches<mk_allgather_gemm_args_t>("mode", MK_OPERATOR_ALLGATHER_GEMM, MK_ALLGATHER_GEMM_ARGS_INIT,
                                         [](auto& args) {
                                           args.mode = MK_ALLGATHER_WGRAD;
                                           // Rows as wide as the others', and the operands' memory suffices.
                                           args.n = args.ldc = kK;
                                           args.k = args.ldb = 8;
                                         }),
      launches<mk_gemm_reduce_scatter_args_t>("n", MK_OPERATOR_GEMM_REDUCE_SCATTER,
                                              MK_GEMM_REDUCE_SCATTER_ARGS_INIT,
                                              [](auto& args) { args.n -= 4; }),
      launches<mk_gemm_allreduce_args_t>("dtype", MK_OPERATOR_GEMM_ALLREDUCE, MK_GEMM_ALLREDUCE_ARGS_INIT,
                                         [](auto& args) { args.dtype = MK_DTYPE_FP16; }),
      launches<mk_gemm_allreduce_args_t>("out_dtype", MK_OPERATOR_GEMM_ALLREDUCE, MK_GEMM_ALLREDUCE_ARGS_INIT,
                                         [](auto& args) {
                                           args.out_dtype = MK_DTYPE_BF16;
                                           args.comm_dtype = MK_DTYPE_BF16;
                                         }),
      launches<mk_gemm_reduce_scatter_args_t>("tuning", MK_OPERATOR_GEMM_REDUCE_SCATTER,
                                              MK_GEMM_REDUCE_SCATTER_ARGS_INIT,
                                              [](auto& args) { args.tuning = &tuning; }),
      {"operator",
       [](mk_comm_t comm, int rank, int nranks, bool odd) {
         ExactCall call(odd ? MK_OPERATOR_GEMM_ALLREDUCE : MK_OPERATOR_GEMM_REDUCE_SCATTER, nranks, rank, 1, kM,
                        kN, kK);
         std::string wrong;
         return run_exact_call(comm, call, wrong);
       }},
      one_elsewhere("mk_mem_alloc and a launch", [](mk_comm_t comm) { return allocate(comm, 512); }),
      one_elsewhere("mk_comm_finalize and a launch", [](mk_comm_t comm) { return mk_comm_finalize(comm); }),
      one_elsewhere("prepare and a launch",
                    [](mk_comm_t comm) {
                      mk_gemm_maxima_t maxima = MK_GEMM_MAXIMA_INIT;
                      maxima.m = 4096, maxima.n = 64, maxima.k = 64;
                      return mk_gemm_allreduce_prepare(comm, &maxima);
                    }),
  };
}

mk_status_t prepare_wgrad(mk_comm_t comm) {
  mk_gemm_maxima_t maxima = MK_GEMM_MAXIMA_INIT;
  maxima.m = kM, maxima.n = maxima.k = kK;
  maxima.out_dtype = MK_DTYPE_FP32;
  maxima.mode = MK_ALLGATHER_WGRAD;
  return mk_allgather_gemm_prepare(comm, &maxima);
}

std::vector<Outcome> prepare_all(ThreadJob& job) {
  return job.each([](int, mk_comm_t comm) {
    mk_gemm_maxima_t maxima = MK_GEMM_MAXIMA_INIT;
    maxima.m = kM, maxima.n = kN, maxima.k = kK;
    maxima.out_dtype = MK_DTYPE_FP32;
    mk_status_t status = mk_allgather_gemm_prepare(comm, &maxima);
    if (status == MK_SUCCESS) status = prepare_wgrad(comm);
    if (status == MK_SUCCESS) status = mk_gemm_reduce_scatter_prepare(comm, &maxima);
    if (status == MK_SUCCESS) status = mk_gemm_allreduce_prepare(comm, &maxima);
    return status;
  });
}

// The ranks that a sentence names: "rank 3", "ranks 0 and 2".
std::set<int> ranks_named(const std::string& sentence) {
  std::set<int> named;
  for (size_t at = 0; (at = sentence.find("rank", at)) != std::string::npos; ++at) {
    int first = 0, second = 0;
    const int found = std::sscanf(sentence.c_str() + at, "ranks %d and %d", &first, &second);
    if (found == 2) named.insert({first, second});
    if (std::sscanf(sentence.c_str() + at, "rank %d", &first) == 1) named.insert(first);
  }
  return named;
}

void check_disagreement(ThreadJob& job, const Disagreement& disagreement, int odd, bool clear, uint64_t turn) {
  INFO(disagreement.name << ", odd rank " << odd << " of " << job.nranks() << ", turn " << turn);
  const auto outcomes = job.each(
      [&](int rank, mk_comm_t comm) { return disagreement.act(comm, rank, job.nranks(), rank == odd); });
  INFO(text_of(outcomes));
  REQUIRE(all_answer(outcomes, MK_ERROR_MISMATCH));
  for (const Outcome& outcome : outcomes) {
    CHECK(outcome.sentence == outcomes[0].sentence);
    const std::set<int> named = ranks_named(outcome.sentence);
    CHECK(named.size() == 2);
    CHECK(named.count(odd) == 1);
  }
  // An error that is not cleared stays, and the communicator works all the same.
  std::vector<mk_status_t> left(outcomes.size());
  job.each([&](int rank, mk_comm_t comm) {
    mk_async_error_t error = MK_ASYNC_ERROR_INIT;
    const mk_status_t cleared = clear ? mk_comm_clear_async_error(comm) : MK_SUCCESS;
    const mk_status_t got = mk_comm_get_async_error(comm, &error);
    left[static_cast<size_t>(rank)] = error.status;
    return cleared == MK_SUCCESS ? got : cleared;
  });
  std::vector<std::string> wrong(outcomes.size());
  const auto good = job.each([&](int rank, mk_comm_t comm) {
    ExactCall call(static_cast<mk_operator_t>(1 + turn % 3), job.nranks(), rank, turn, kM, kN, kK);
    const mk_status_t launched = call.launch(comm);
    if (launched != MK_SUCCESS) return launched;
    const mk_status_t ended = mk_comm_synchronize(comm, nullptr);
    wrong[static_cast<size_t>(rank)] = call.wrong();
    return ended;
  });
  INFO("the good call after it:\n" << text_of(good));
  for (size_t rank = 0; rank < good.size(); ++rank) {
    CHECK((left[rank] == MK_SUCCESS || (!clear && left[rank] == MK_ERROR_MISMATCH)));
    CHECK(good[rank].status == left[rank]);
    CHECK(wrong[rank] == "");
  }
  if (clear) return;
  // Another call's error does not get into the words of this one.
  for (int rank = 0; rank < job.nranks(); ++rank) {
    if (left[static_cast<size_t>(rank)] == MK_SUCCESS) continue;
    REQUIRE(mk_comm_get_info(job.comm(rank), nullptr) == MK_ERROR_INVALID_ARGUMENT);
    const Outcome again = job.on(rank, [](int, mk_comm_t comm) { return mk_comm_synchronize(comm, nullptr); });
    CHECK(again.sentence == outcomes[0].sentence);
    CHECK(mk_comm_clear_async_error(job.comm(rank)) == MK_SUCCESS);
  }
}

}  // namespace

TEST_CASE("every disagreement, by every rank") {
  const int nranks = GENERATE(2, 3);
  const int num_nodes = GENERATE(1, 2);
  ThreadJob job(JobOptions(node_layout(nranks, num_nodes)));
  REQUIRE(failures(job.started()) == "");
  REQUIRE(all_answer(prepare_all(job), MK_SUCCESS));
  uint64_t turn = 0;
  for (const auto& list : {at_meetings(), at_launches()}) {
    for (const Disagreement& disagreement : list) {
      for (int odd = 0; odd < nranks; ++odd) check_disagreement(job, disagreement, odd, true, ++turn);
    }
  }
  REQUIRE(all_answer(job.finalize(), MK_SUCCESS));
}

TEST_CASE("disagreements and good calls, fifty times in turn") {
  const int nranks = GENERATE(2, 3, 5);
  const int num_nodes = GENERATE(1, 2);
  ThreadJob job(JobOptions(node_layout(nranks, num_nodes)));
  REQUIRE(failures(job.started()) == "");
  REQUIRE(all_answer(prepare_all(job), MK_SUCCESS));
  std::vector<Disagreement> all = at_meetings();
  for (const Disagreement& more : at_launches()) all.push_back(more);
  std::mt19937_64 random(static_cast<uint64_t>(nranks * 10 + num_nodes));
  for (uint64_t turn = 0; turn < 50; ++turn) {
    const int odd = static_cast<int>(random() % static_cast<uint64_t>(nranks));
    check_disagreement(job, all[random() % all.size()], odd, random() % 2 == 0, turn);
  }
  REQUIRE(all_answer(job.finalize(), MK_SUCCESS));
}

TEST_CASE("a disagreement in the asynchronous error and the flight record") {
  ThreadJob job(JobOptions(node_layout(3, 1)));
  REQUIRE(failures(job.started()) == "");
  REQUIRE(all_answer(prepare_all(job), MK_SUCCESS));
  job.each([](int rank, mk_comm_t comm) {
    ExactCall call(MK_OPERATOR_ALLGATHER_GEMM, 3, rank, 1, rank == 1 ? kM : kM - 3, kN, kK);
    std::string wrong;
    return run_exact_call(comm, call, wrong);
  });
  for (int rank = 0; rank < 3; ++rank) {
    mk_async_error_t error = MK_ASYNC_ERROR_INIT;
    REQUIRE(mk_comm_get_async_error(job.comm(rank), &error) == MK_SUCCESS);
    CHECK(error.status == MK_ERROR_MISMATCH);
    CHECK(error.op == MK_OPERATOR_ALLGATHER_GEMM);
    CHECK(error.epoch == 1);
    CHECK(error.waiter_rank == -1);
    mk_flight_entry_t entry;
    size_t count = 0;
    REQUIRE(mk_comm_get_flight_record(job.comm(rank), &entry, 1, &count) == MK_SUCCESS);
    REQUIRE(count == 1);
    CHECK(entry.state == 3);
    CHECK(entry.shape[0] == (rank == 1 ? kM : kM - 3));
  }
  // Finalize returns the error that is left.
  CHECK(all_answer(job.finalize(), MK_ERROR_MISMATCH));
  CHECK(all_answer(job.destroy(), MK_SUCCESS));
}
