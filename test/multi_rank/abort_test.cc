// SPDX-License-Identifier: MIT
// mk_comm_abort from another thread at random moments of everything that blocks: it returns within 5 s, what is
// blocked returns MK_ERROR_ABORTED, and the other ranks hear who it was.
#include <atomic>
#include <chrono>
#include <random>

#include "test/multi_rank/exact_call.h"
#include "test/multi_rank/thread_job.h"
#include "test/support/catch.h"
#include "test/support/process_state.h"

using namespace mk::test;

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}
void pause_us(uint64_t microseconds) { std::this_thread::sleep_for(std::chrono::microseconds(microseconds)); }

// What the ranks are in when one of them aborts.
enum class Phase {
  init,
  init_rank_missing,
  init_no_root,
  prepare,
  prepare_alone,
  operators,
  operator_alone,
  mem_alloc,
  finalize,
  finalize_alone
};

const char* name_of(Phase phase) {
  switch (phase) {
    case Phase::init:
      return "mk_comm_init";
    case Phase::init_rank_missing:
      return "mk_comm_init, a rank missing";
    case Phase::init_no_root:
      return "mk_comm_init, no root";
    case Phase::prepare:
      return "prepare";
    case Phase::prepare_alone:
      return "prepare, a rank stays away";
    case Phase::operators:
      return "operators";
    case Phase::operator_alone:
      return "an operator that a rank never enters";
    case Phase::mem_alloc:
      return "mk_mem_alloc";
    case Phase::finalize:
      return "mk_comm_finalize";
    case Phase::finalize_alone:
      return "mk_comm_finalize, a rank stays away";
  }
  return "";
}

mk_status_t prepare(mk_comm_t comm, int64_t m) {
  mk_gemm_maxima_t maxima = MK_GEMM_MAXIMA_INIT;
  maxima.m = m, maxima.n = 64, maxima.k = 64;
  return mk_gemm_allreduce_prepare(comm, &maxima);
}

// Works in the phase until a call fails; mk_comm_finalize may succeed.
mk_status_t work(Phase phase, mk_comm_t comm, int rank, int nranks) {
  const auto give_up = Clock::now() + std::chrono::seconds(60);
  for (uint64_t turn = 1; Clock::now() < give_up; ++turn) {
    mk_status_t status = MK_SUCCESS;
    switch (phase) {
      case Phase::prepare:
      case Phase::prepare_alone:
        status = prepare(comm, static_cast<int64_t>(64 * turn));
        break;
      case Phase::mem_alloc: {
        void* memory = nullptr;
        status = mk_mem_alloc(comm, turn * 50000, &memory);
        if (status == MK_SUCCESS && turn % 2 == 0) status = mk_mem_free(comm, memory);
        break;
      }
      case Phase::finalize:
      case Phase::finalize_alone:
        return mk_comm_finalize(comm);
      default: {
        ExactCall call(static_cast<mk_operator_t>(1 + turn % 3), nranks, rank, turn, 40, 16, 32);
        std::string wrong;
        status = run_exact_call(comm, call, wrong);
        // A call that failed half-way may still be reading its operands.
        if (status != MK_SUCCESS) mk_comm_synchronize(comm, nullptr);
      }
    }
    if (status != MK_SUCCESS) return status;
  }
  return MK_ERROR_INTERNAL;  // nobody aborted
}

struct Scene {
  Phase phase;
  int nranks;
  int num_nodes;
  int aborter;
  uint64_t delay_us;
};

struct RankEnd {
  Outcome outcome;
  int32_t blamed = -1;
  double seconds = 0;  // from the abort
};

bool stays_away(const Scene& scene, int rank) {
  const bool alone = scene.phase == Phase::prepare_alone || scene.phase == Phase::operator_alone ||
                     scene.phase == Phase::finalize_alone;
  return alone && rank == (scene.aborter + 1) % scene.nranks;
}

void check_end(const Scene& scene, int rank, const RankEnd& end) {
  INFO("rank " << rank << " after " << end.seconds << " s: " << text_of(end.outcome));
  const bool may_finish = scene.phase == Phase::finalize || scene.phase == Phase::finalize_alone;
  if (may_finish && end.outcome.status == MK_SUCCESS) return;
  if (rank == scene.aborter) {
    CHECK(end.seconds < 5);
    CHECK(end.outcome.status == MK_ERROR_ABORTED);
  } else {
    CHECK(end.seconds < 10);
    CHECK(end.outcome.status == MK_ERROR_REMOTE);
    CHECK(end.blamed == scene.aborter);
  }
  CHECK(end.outcome.says("rank " + std::to_string(scene.aborter)));
}

// After mk_comm_init: all ranks work, one aborts.
void abort_in_phase(const Scene& scene) {
  ThreadJob job(JobOptions(node_layout(scene.nranks, scene.num_nodes)));
  REQUIRE(failures(job.started()) == "");
  const auto start = Clock::now();
  std::atomic<double> abort_seconds{-1};
  std::thread aborter([&] {
    pause_us(scene.delay_us);
    const auto called = Clock::now();
    mk_comm_abort(job.comm(scene.aborter));
    abort_seconds = seconds_since(called);
  });
  std::vector<RankEnd> ends(static_cast<size_t>(scene.nranks));
  const auto outcomes = job.each([&](int rank, mk_comm_t comm) {
    RankEnd& end = ends[static_cast<size_t>(rank)];
    // The rank that stays away sees the loss without a call.
    mk_async_error_t error = MK_ASYNC_ERROR_INIT;
    while (stays_away(scene, rank) && error.status == MK_SUCCESS && seconds_since(start) < 20) {
      pause_us(2000);
      mk_comm_get_async_error(comm, &error);
    }
    const mk_status_t status = work(scene.phase, comm, rank, scene.nranks);
    end.seconds = seconds_since(start) - static_cast<double>(scene.delay_us) * 1e-6;
    mk_comm_get_async_error(comm, &error);
    end.blamed = error.rank;
    return status;
  });
  aborter.join();
  CHECK(abort_seconds < 5);
  for (int rank = 0; rank < scene.nranks; ++rank) {
    ends[static_cast<size_t>(rank)].outcome = outcomes[static_cast<size_t>(rank)];
    check_end(scene, rank, ends[static_cast<size_t>(rank)]);
  }
  CHECK(all_answer(job.destroy(), MK_SUCCESS));
}

// During mk_comm_init: the handle is there before the call blocks.
void abort_in_init(const Scene& scene) {
  mk_unique_id_t id;
  REQUIRE(mk_get_unique_id(&id) == MK_SUCCESS);
  if (scene.phase == Phase::init_no_root) {
    // Its root serves one job of one rank and ends.
    mk_comm_t used = nullptr;
    mk_comm_config_t config = MK_COMM_CONFIG_INIT;
    config.device = MK_DEVICE_HOST;
    REQUIRE(mk_comm_init(&used, &id, 1, 0, &config) == MK_SUCCESS);
    REQUIRE(mk_comm_destroy(used) == MK_SUCCESS);
  }
  const std::vector<int32_t> nodes = node_layout(scene.nranks, scene.num_nodes);
  mk_comm_config_t config = MK_COMM_CONFIG_INIT;
  config.device = MK_DEVICE_HOST;
  config.host_threads = 1;
  config.node_of_rank = nodes.data();
  config.init_timeout_ms = scene.phase == Phase::init ? 3000 : 1000;
  std::vector<mk_comm_t> comms(nodes.size(), nullptr);
  std::vector<RankEnd> ends(nodes.size());
  const int missing = scene.phase == Phase::init ? -1 : (scene.aborter + 1) % scene.nranks;
  const auto start = Clock::now();
  std::atomic<double> abort_seconds{-1};
  std::vector<std::thread> threads;
  for (int rank = 0; rank < scene.nranks; ++rank) {
    if (rank == missing) continue;
    threads.emplace_back([&, rank] {
      const auto slot = static_cast<size_t>(rank);
      const mk_status_t status = mk_comm_init(&comms[slot], &id, scene.nranks, rank, &config);
      ends[slot].seconds = seconds_since(start) - static_cast<double>(scene.delay_us) * 1e-6;
      ends[slot].outcome = {status, status == MK_SUCCESS ? "" : mk_get_last_error(nullptr)};
    });
  }
  threads.emplace_back([&] {
    pause_us(scene.delay_us);
    const mk_comm_t comm = __atomic_load_n(&comms[static_cast<size_t>(scene.aborter)], __ATOMIC_ACQUIRE);
    const auto called = Clock::now();
    if (comm != nullptr) mk_comm_abort(comm);
    abort_seconds = comm != nullptr ? seconds_since(called) : -2;
  });
  for (std::thread& thread : threads) thread.join();
  CHECK(abort_seconds < 5);
  const bool was_aborted = abort_seconds > -2;
  for (int rank = 0; rank < scene.nranks; ++rank) {
    const RankEnd& end = ends[static_cast<size_t>(rank)];
    INFO("rank " << rank << " after " << end.seconds << " s: " << text_of(end.outcome));
    if (rank == missing) continue;
    // Who was through already has a communicator; the abort ends it later.
    if (end.outcome.status == MK_SUCCESS) {
      CHECK(missing == -1);
      CHECK(mk_comm_destroy(comms[static_cast<size_t>(rank)]) == MK_SUCCESS);
      continue;
    }
    CHECK(comms[static_cast<size_t>(rank)] == nullptr);
    if (rank == scene.aborter && was_aborted) {
      CHECK(end.seconds < 5);
      CHECK(end.outcome.status == MK_ERROR_ABORTED);
    } else {
      // Who had not reached the root when it aborted is only missing.
      CHECK((end.outcome.status == MK_ERROR_REMOTE || end.outcome.status == MK_ERROR_TIMEOUT ||
             end.outcome.status == MK_ERROR_NETWORK));
      CHECK(end.seconds < static_cast<double>(config.init_timeout_ms) * 1e-3 + 1);
      if (was_aborted && end.outcome.status == MK_ERROR_REMOTE) {
        CHECK(end.outcome.says("rank " + std::to_string(scene.aborter)));
      } else {
        CHECK((end.outcome.says("rank") || end.outcome.says("root")));
      }
    }
  }
}

void run_scene(const Scene& scene) {
  INFO(name_of(scene.phase) << ", W " << scene.nranks << ", nodes " << scene.num_nodes << ", rank "
                            << scene.aborter << " aborts after " << scene.delay_us << " us");
  if (scene.phase <= Phase::init_no_root) {
    abort_in_init(scene);
  } else {
    abort_in_phase(scene);
  }
}

void run_scenes(std::initializer_list<Phase> phases, int count, uint64_t most_us, uint64_t seed) {
  std::mt19937_64 random(seed);
  for (const Phase phase : phases) {
    for (int turn = 0; turn < count; ++turn) {
      const int nranks = 2 + static_cast<int>(random() % 4);
      const int aborter = static_cast<int>(random() % static_cast<uint64_t>(nranks));
      run_scene({phase, nranks, 1 + turn % 2, aborter, random() % most_us});
    }
  }
}

}  // namespace

TEST_CASE("abort during mk_comm_init") {
  run_scenes({Phase::init}, 30, 15000, 1);
  run_scenes({Phase::init_rank_missing, Phase::init_no_root}, 4, 60000, 2);
}

TEST_CASE("abort during host-collective calls") {
  run_scenes({Phase::prepare, Phase::mem_alloc}, 12, 30000, 3);
  run_scenes({Phase::prepare_alone}, 4, 30000, 4);
}

TEST_CASE("abort during operators") {
  run_scenes({Phase::operators}, 25, 30000, 5);
  run_scenes({Phase::operator_alone}, 8, 30000, 6);
}

TEST_CASE("abort during mk_comm_finalize") {
  run_scenes({Phase::finalize}, 16, 1500, 7);
  run_scenes({Phase::finalize_alone}, 4, 20000, 8);
}

TEST_CASE("abort again, and what is left after it") {
  const int descriptors = open_descriptors();
  const int threads = running_threads();
  {
    ThreadJob job(JobOptions(node_layout(3, 2)));
    REQUIRE(failures(job.started()) == "");
    CHECK(mk_comm_abort(job.comm(1)) == MK_SUCCESS);
    CHECK(mk_comm_abort(job.comm(1)) == MK_SUCCESS);
    const auto launched = job.each([](int rank, mk_comm_t comm) {
      ExactCall call(MK_OPERATOR_ALLGATHER_GEMM, 3, rank, 1);
      std::string wrong;
      return run_exact_call(comm, call, wrong);
    });
    INFO(text_of(launched));
    CHECK(launched[1].status == MK_ERROR_ABORTED);
    CHECK(launched[0].status == MK_ERROR_REMOTE);
    CHECK(launched[2].status == MK_ERROR_REMOTE);
    void* memory = nullptr;
    CHECK(mk_mem_alloc(job.comm(1), 64, &memory) == MK_ERROR_ABORTED);
    CHECK(prepare(job.comm(1), 8) == MK_ERROR_ABORTED);
    CHECK(mk_comm_finalize(job.comm(1)) == MK_ERROR_ABORTED);
    mk_comm_info_t info = MK_COMM_INFO_INIT;
    CHECK(mk_comm_get_info(job.comm(1), &info) == MK_SUCCESS);
    CHECK(all_answer(job.destroy(), MK_SUCCESS));
  }
  CHECK(open_descriptors() == descriptors);
  CHECK(running_threads_settle_at(threads));
}
