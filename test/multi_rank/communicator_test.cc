// SPDX-License-Identifier: MIT
// Communicators through the C interface: making and ending them, several at once, what they say of themselves,
// and their memory.
#include <cstring>
#include <mutex>
#include <set>

#include "test/multi_rank/exact_call.h"
#include "test/multi_rank/process_job.h"
#include "test/multi_rank/thread_job.h"
#include "test/support/catch.h"
#include "test/support/log_lines.h"
#include "test/support/process_state.h"

using namespace mk::test;

namespace {

std::string run_all_operators(ThreadJob& job, uint64_t seed) {
  std::vector<std::string> wrong(static_cast<size_t>(job.nranks()));
  for (int op = 1; op <= 3; ++op) {
    const auto outcomes = job.each([&](int rank, mk_comm_t comm) {
      ExactCall call(static_cast<mk_operator_t>(op), job.nranks(), rank, seed, 40, 16, 32);
      return run_exact_call(comm, call, wrong[static_cast<size_t>(rank)]);
    });
    if (!all_answer(outcomes, MK_SUCCESS)) return text_of(outcomes);
    for (const std::string& text : wrong) {
      if (!text.empty()) return text;
    }
  }
  return "";
}

// Library memory of a communicator that nothing has been prepared on.
uint64_t workspace_of_new(const JobOptions& options) {
  ThreadJob job(options);
  REQUIRE(all_answer(job.started(), MK_SUCCESS));
  mk_comm_info_t info = MK_COMM_INFO_INIT;
  REQUIRE(mk_comm_get_info(job.comm(0), &info) == MK_SUCCESS);
  return info.workspace_bytes;
}

}  // namespace

// First, while this process has no threads.
TEST_CASE("ranks as processes") {
  for (const int num_nodes : {1, 2}) {
    constexpr int kRanks = 3;
    ProcessJob job(kRanks, 120, [&](RankProcess& self) {
      const Holdings before;
      Report report;
      mk_unique_id_t id;
      if (!self.share_id(&id)) return;
      const std::vector<int32_t> nodes = node_layout(kRanks, num_nodes);
      mk_comm_config_t config = MK_COMM_CONFIG_INIT;
      config.device = MK_DEVICE_HOST;
      config.node_of_rank = nodes.data();
      mk_comm_t comm = nullptr;
      std::string wrong;
      report.status = mk_comm_init(&comm, &id, kRanks, self.rank(), &config);
      for (uint64_t turn = 0; turn < 6 && report.status == MK_SUCCESS && wrong.empty(); ++turn) {
        ExactCall call(static_cast<mk_operator_t>(1 + turn % 3), kRanks, self.rank(), turn, 100, 16, 32);
        report.status = run_exact_call(comm, call, wrong);
      }
      if (report.status == MK_SUCCESS) report.status = mk_comm_finalize(comm);
      std::snprintf(report.sentence, sizeof report.sentence, "%s",
                    wrong.empty() ? mk_get_last_error(comm) : wrong.c_str());
      report.destroyed = mk_comm_destroy(comm);
      before.compare(report);
      self.tell(report);
    });
    REQUIRE(job.pass_id_on());
    for (int rank = 0; rank < kRanks; ++rank) {
      const auto report = job.receive(rank);
      REQUIRE(report);
      INFO("rank " << rank << ": " << report->text());
      CHECK(report->status == MK_SUCCESS);
      CHECK(std::string(report->sentence).empty());
      CHECK(report->destroyed == MK_SUCCESS);
      CHECK(report->descriptors_left == 0);
      CHECK(report->threads_left == 0);
      CHECK(report->mappings_left == 0);
      CHECK(job.wait_for(rank) == 0);
    }
  }
}

TEST_CASE("a hundred communicators, one after another, leave nothing") {
  const int shared = shared_memory_files();
  int descriptors = 0, threads = 0, maps = 0;
  for (int turn = 0; turn < 100; ++turn) {
    if (turn == 1) {  // the first may leave what the process keeps
      await_ending_threads();
      threads = running_threads();
      descriptors = open_descriptors();
      maps = mappings("memfd");
    }
    ThreadJob job(JobOptions(node_layout(1 + turn % 4, 1 + turn % 2)));
    REQUIRE(failures(job.started()) == "");
    if (turn % 5 == 0) REQUIRE(run_all_operators(job, static_cast<uint64_t>(turn)) == "");
    // Some go without taking leave.
    if (turn % 7 != 6) REQUIRE(all_answer(job.finalize(), MK_SUCCESS));
    REQUIRE(all_answer(job.destroy(), MK_SUCCESS));
  }
  CHECK(running_threads_settle_at(threads));
  CHECK(open_descriptors() == descriptors);
  CHECK(mappings("memfd") == maps);
  CHECK(shared_memory_files() == shared);
}

TEST_CASE("several communicators at once") {
  std::vector<std::unique_ptr<ThreadJob>> jobs;
  for (const auto& nodes : {node_layout(2, 1), node_layout(3, 3), node_layout(4, 2)}) {
    jobs.push_back(std::make_unique<ThreadJob>(JobOptions(nodes)));
    REQUIRE(all_answer(jobs.back()->started(), MK_SUCCESS));
  }
  std::vector<std::string> wrong(jobs.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < jobs.size(); ++i) {
    threads.emplace_back([&, i] {
      for (uint64_t turn = 0; turn < 10 && wrong[i].empty(); ++turn)
        wrong[i] = run_all_operators(*jobs[i], turn);
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(wrong == std::vector<std::string>(jobs.size()));
  // The end of one is not felt by the others.
  CHECK(mk_comm_abort(jobs[1]->comm(2)) == MK_SUCCESS);
  CHECK(run_all_operators(*jobs[0], 99) == "");
  CHECK(run_all_operators(*jobs[2], 99) == "");
  CHECK(all_answer(jobs[0]->finalize(), MK_SUCCESS));
  CHECK(all_answer(jobs[2]->finalize(), MK_SUCCESS));
}

TEST_CASE("one thread drives all ranks through groups") {
  const int nranks = GENERATE(1, 3, 5);
  const std::vector<int32_t> nodes = node_layout(nranks, nranks > 1 ? 2 : 1);
  mk_unique_id_t id;
  REQUIRE(mk_get_unique_id(&id) == MK_SUCCESS);
  mk_comm_config_t config = MK_COMM_CONFIG_INIT;
  config.device = MK_DEVICE_HOST;
  config.host_threads = 1;
  config.node_of_rank = nodes.data();
  std::vector<mk_comm_t> comms(nodes.size(), nullptr);
  const auto in_group = [&](const std::function<mk_status_t(mk_comm_t&, int)>& call) {
    REQUIRE(mk_group_start() == MK_SUCCESS);
    for (int rank = 0; rank < nranks; ++rank)
      REQUIRE(call(comms[static_cast<size_t>(rank)], rank) == MK_SUCCESS);
    const mk_status_t status = mk_group_end();
    INFO(mk_get_last_error(nullptr));
    REQUIRE(status == MK_SUCCESS);
  };
  in_group([&](mk_comm_t& comm, int rank) { return mk_comm_init(&comm, &id, nranks, rank, &config); });

  mk_gemm_maxima_t maxima = MK_GEMM_MAXIMA_INIT;
  maxima.m = 40, maxima.n = 16, maxima.k = 32;
  std::vector<void*> memory(nodes.size(), nullptr);
  // Two calls a communicator in one group, one of them in a nested one.
  REQUIRE(mk_group_start() == MK_SUCCESS);
  in_group([&](mk_comm_t& comm, int) { return mk_allgather_gemm_prepare(comm, &maxima); });
  for (int rank = 0; rank < nranks; ++rank) {
    CHECK(memory[static_cast<size_t>(rank)] == nullptr);  // the inner end has not acted
    REQUIRE(mk_mem_alloc(comms[static_cast<size_t>(rank)], 1000, &memory[static_cast<size_t>(rank)]) ==
            MK_SUCCESS);
  }
  REQUIRE(mk_group_end() == MK_SUCCESS);

  std::vector<ExactCall> calls;
  for (int rank = 0; rank < nranks; ++rank)
    calls.emplace_back(MK_OPERATOR_ALLGATHER_GEMM, nranks, rank, 3, 40, 16, 32);
  // Prepared operators run inside a group too; one that would have to prepare does not.
  REQUIRE(mk_group_start() == MK_SUCCESS);
  for (int rank = 0; rank < nranks; ++rank) {
    const auto slot = static_cast<size_t>(rank);
    CHECK(memory[slot] != nullptr);
    CHECK(reinterpret_cast<uintptr_t>(memory[slot]) % 256 == 0);
    CHECK(calls[slot].launch(comms[slot]) == MK_SUCCESS);
    ExactCall unprepared(MK_OPERATOR_GEMM_ALLREDUCE, nranks, rank, 3, 40, 16, 32);
    CHECK(unprepared.launch(comms[slot]) == MK_ERROR_NOT_PREPARED);
    CHECK(std::strstr(mk_get_last_error(comms[slot]), "inside a group") != nullptr);
  }
  REQUIRE(mk_group_end() == MK_SUCCESS);
  for (int rank = 0; rank < nranks; ++rank) {
    const auto slot = static_cast<size_t>(rank);
    REQUIRE(mk_comm_synchronize(comms[slot], nullptr) == MK_SUCCESS);
    CHECK(calls[slot].wrong() == "");
  }
  in_group([&](mk_comm_t& comm, int rank) { return mk_mem_free(comm, memory[static_cast<size_t>(rank)]); });
  in_group([&](mk_comm_t& comm, int) { return mk_comm_finalize(comm); });
  for (mk_comm_t comm : comms) CHECK(mk_comm_destroy(comm) == MK_SUCCESS);
  CHECK(mk_group_end() == MK_ERROR_INVALID_ARGUMENT);
  CHECK(std::strstr(mk_get_last_error(nullptr), "mk_group_start") != nullptr);
}

TEST_CASE("what a communicator says of itself") {
  // Node 7 is met first, so it is node 0.
  const std::vector<int32_t> round_robin = {7, 3, 7, 3, 7};
  JobOptions options(round_robin);
  options.config.host_threads = 2;
  ThreadJob job(options);
  REQUIRE(failures(job.started()) == "");
  REQUIRE(run_all_operators(job, 1) == "");
  for (int rank = 0; rank < 5; ++rank) {
    mk_comm_info_t info = MK_COMM_INFO_INIT;
    REQUIRE(mk_comm_get_info(job.comm(rank), &info) == MK_SUCCESS);
    CHECK(info.rank == rank);
    CHECK(info.nranks == 5);
    CHECK(info.node == rank % 2);
    CHECK(info.num_nodes == 2);
    CHECK(info.local_rank == rank / 2);
    CHECK(info.local_nranks == (rank % 2 == 0 ? 3 : 2));
    CHECK(info.device == MK_DEVICE_HOST);
    CHECK(info.cuda_device == -1);
    CHECK(info.host_threads == 2);
    CHECK(info.prepared == (1 << 1 | 1 << 2 | 1 << 3));
    CHECK(info.epoch == 3);
    CHECK(info.workspace_bytes > 0);
    CHECK(std::string(info.transport) == "loopback");

    mk_flight_entry_t entries[8];
    size_t count = 0;
    REQUIRE(mk_comm_get_flight_record(job.comm(rank), entries, 8, &count) == MK_SUCCESS);
    REQUIRE(count == 3);
    for (size_t i = 0; i < count; ++i) {
      CHECK(entries[i].epoch == i + 1);
      CHECK(entries[i].op == static_cast<mk_operator_t>(i + 1));
      CHECK(entries[i].state == 2);
      CHECK(entries[i].shape[0] == 40);
      CHECK(entries[i].shape[1] == 16);
      CHECK(entries[i].shape[2] == 32);
      CHECK(entries[i].duration_us >= 0);
      CHECK((i == 0 || entries[i].start_us >= entries[i - 1].start_us));
    }
    // With less room, the latest ones.
    REQUIRE(mk_comm_get_flight_record(job.comm(rank), entries, 2, &count) == MK_SUCCESS);
    CHECK(count == 2);
    CHECK(entries[1].epoch == 3);
    mk_async_error_t error = MK_ASYNC_ERROR_INIT;
    REQUIRE(mk_comm_get_async_error(job.comm(rank), &error) == MK_SUCCESS);
    CHECK(error.status == MK_SUCCESS);
    CHECK(error.rank == -1);
    CHECK(error.waiter_rank == -1);
    CHECK(mk_comm_clear_async_error(job.comm(rank)) == MK_SUCCESS);
    CHECK(std::string(mk_get_last_error(job.comm(rank))).empty());
  }
  CHECK(all_answer(job.finalize(), MK_SUCCESS));
}

TEST_CASE("the flight record keeps the last 64 launches") {
  ThreadJob job(JobOptions(node_layout(2, 1)));
  REQUIRE(failures(job.started()) == "");
  for (uint64_t turn = 0; turn < 25; ++turn) REQUIRE(run_all_operators(job, turn) == "");
  std::vector<mk_flight_entry_t> entries(100);
  size_t count = 0;
  REQUIRE(mk_comm_get_flight_record(job.comm(1), entries.data(), entries.size(), &count) == MK_SUCCESS);
  REQUIRE(count == 64);
  for (size_t i = 0; i < count; ++i) CHECK(entries[i].epoch == 12 + i);
  CHECK(all_answer(job.finalize(), MK_SUCCESS));
}

TEST_CASE("symmetric and registered memory") {
  const int num_nodes = GENERATE(1, 3);
  ThreadJob job(JobOptions(node_layout(3, num_nodes)));
  REQUIRE(failures(job.started()) == "");
  std::vector<std::vector<void*>> held(3);
  for (size_t turn = 1; turn <= 12; ++turn) {
    const size_t bytes = turn * 777777;
    REQUIRE(all_answer(job.each([&](int rank, mk_comm_t comm) {
      void* memory = nullptr;
      const mk_status_t status = mk_mem_alloc(comm, bytes, &memory);
      if (status != MK_SUCCESS) return status;
      if (reinterpret_cast<uintptr_t>(memory) % 256 != 0) return MK_ERROR_INTERNAL;
      std::memset(memory, static_cast<int>(turn), bytes);
      held[static_cast<size_t>(rank)].push_back(memory);
      return status;
    }),
                       MK_SUCCESS));
    // Growth moves nothing: what was written before is there.
    for (const auto& list : held) {
      for (size_t i = 0; i < list.size(); ++i) CHECK(static_cast<unsigned char*>(list[i])[777] == i + 1);
    }
  }
  REQUIRE(all_answer(job.each([&](int rank, mk_comm_t comm) {
    for (void* memory : held[static_cast<size_t>(rank)]) {
      if (const mk_status_t status = mk_mem_free(comm, memory); status != MK_SUCCESS) return status;
    }
    return mk_mem_free(comm, nullptr);
  }),
                     MK_SUCCESS));
  // Freed twice, and not at its start.
  CHECK(mk_mem_free(job.comm(0), held[0][0]) == MK_ERROR_INVALID_ARGUMENT);
  CHECK(std::strstr(mk_get_last_error(job.comm(0)), "mk_mem_free: expected") != nullptr);
  CHECK(mk_mem_free(job.comm(1), static_cast<char*>(held[1][0]) + 256) == MK_ERROR_INVALID_ARGUMENT);

  std::vector<std::vector<char>> buffers(3, std::vector<char>(4096));
  std::vector<mk_memory_t> memories(3), empty(3);
  REQUIRE(all_answer(job.each([&](int rank, mk_comm_t comm) {
    const auto slot = static_cast<size_t>(rank);
    const mk_status_t status = mk_mem_register(comm, buffers[slot].data(), 1024 * (slot + 1), &memories[slot]);
    return status == MK_SUCCESS ? mk_mem_register(comm, nullptr, 0, &empty[slot]) : status;
  }),
                     MK_SUCCESS));
  mk_memory_t again = nullptr;
  CHECK(mk_mem_register(job.comm(2), buffers[2].data() + 512, 16, &again) == MK_ERROR_INVALID_ARGUMENT);
  CHECK(std::strstr(mk_get_last_error(job.comm(2)), "overlaps") != nullptr);
  CHECK(mk_mem_deregister(job.comm(0), memories[1]) == MK_ERROR_INVALID_HANDLE);
  REQUIRE(all_answer(job.each([&](int rank, mk_comm_t comm) {
    const auto slot = static_cast<size_t>(rank);
    const mk_status_t status = mk_mem_deregister(comm, memories[slot]);
    return status == MK_SUCCESS ? mk_mem_deregister(comm, empty[slot]) : status;
  }),
                     MK_SUCCESS));
  CHECK(mk_mem_deregister(job.comm(1), memories[1]) == MK_ERROR_INVALID_HANDLE);
  REQUIRE(run_all_operators(job, 5) == "");
  CHECK(all_answer(job.finalize(), MK_SUCCESS));
}

TEST_CASE("max_workspace_bytes") {
  JobOptions options(node_layout(2, 1));
  options.config.max_workspace_bytes = workspace_of_new(options) + (4 << 20);
  ThreadJob job(options);
  REQUIRE(failures(job.started()) == "");
  const auto too_much = job.each([](int, mk_comm_t comm) {
    void* memory = nullptr;
    return mk_mem_alloc(comm, 64 << 20, &memory);
  });
  INFO(text_of(too_much));
  CHECK(all_answer(too_much, MK_ERROR_OUT_OF_MEMORY));
  CHECK(too_much[1].says("67108864"));
  CHECK(too_much[1].says("max_workspace_bytes"));
  const auto prepared = job.each([](int, mk_comm_t comm) {
    mk_gemm_maxima_t maxima = MK_GEMM_MAXIMA_INIT;
    maxima.m = 1 << 16, maxima.n = 1 << 10, maxima.k = 1 << 10;
    return mk_gemm_allreduce_prepare(comm, &maxima);
  });
  INFO(text_of(prepared));
  CHECK(all_answer(prepared, MK_ERROR_OUT_OF_MEMORY));
  CHECK(prepared[0].says("max_workspace_bytes"));
  CHECK(run_all_operators(job, 1) == "");
  CHECK(all_answer(job.finalize(), MK_SUCCESS));
}

TEST_CASE("the library's memory never exceeds max_workspace_bytes, whatever steps it grows by") {
  JobOptions options(node_layout(2, 1));
  const uint64_t base = workspace_of_new(options);
  // Room for two steps of 64 KB and a bit, which is less than an allocation takes where there is more.
  options.config.max_workspace_bytes = base + (150 << 10);
  ThreadJob job(options);
  REQUIRE(failures(job.started()) == "");
  const auto allocate = [&](size_t bytes) {
    return job.each([bytes](int, mk_comm_t comm) {
      void* memory = nullptr;
      return mk_mem_alloc(comm, bytes, &memory);
    });
  };
  const auto in_use = [&] {
    mk_comm_info_t of_job = MK_COMM_INFO_INIT;
    REQUIRE(mk_comm_get_info(job.comm(1), &of_job) == MK_SUCCESS);
    return of_job.workspace_bytes;
  };
  CHECK(all_answer(allocate(100 << 10), MK_SUCCESS));
  CHECK(in_use() == base + (128 << 10));
  // What is there already is given out; then 22 KB are left to the limit, but memory grows by 64.
  CHECK(all_answer(allocate(20 << 10), MK_SUCCESS));
  const auto refused = allocate(16 << 10);
  INFO(text_of(refused));
  CHECK(all_answer(refused, MK_ERROR_OUT_OF_MEMORY));
  CHECK(refused[0].says("in steps of 65536"));
  const auto prepared = job.each([](int, mk_comm_t comm) {
    mk_gemm_maxima_t maxima = MK_GEMM_MAXIMA_INIT;
    maxima.m = 8, maxima.n = 8, maxima.k = 8;
    return mk_gemm_allreduce_prepare(comm, &maxima);
  });
  INFO(text_of(prepared));
  CHECK(all_answer(prepared, MK_ERROR_OUT_OF_MEMORY));
  CHECK(prepared[1].says("in steps of 65536"));
  CHECK(in_use() == base + (128 << 10));
  CHECK(all_answer(job.finalize(), MK_SUCCESS));
}

TEST_CASE("configurations and job sizes that differ are named on every rank") {
  const auto init = [](const std::function<void(mk_comm_config_t&, int& nranks, int& rank)>& change) {
    mk_unique_id_t id;
    REQUIRE(mk_get_unique_id(&id) == MK_SUCCESS);
    std::vector<Outcome> outcomes(3);
    std::vector<std::thread> threads;
    for (int index = 0; index < 3; ++index) {
      threads.emplace_back([&, index] {
        mk_comm_config_t config = MK_COMM_CONFIG_INIT;
        config.device = MK_DEVICE_HOST;
        config.init_timeout_ms = 5000;
        int nranks = 3, rank = index;
        if (index == 2) change(config, nranks, rank);
        mk_comm_t comm = nullptr;
        const mk_status_t status = mk_comm_init(&comm, &id, nranks, rank, &config);
        outcomes[static_cast<size_t>(index)] = {status, mk_get_last_error(nullptr)};
        if (comm != nullptr) mk_comm_destroy(comm);
      });
    }
    for (std::thread& thread : threads) thread.join();
    return outcomes;
  };
  struct Case {
    const char* field;
    std::function<void(mk_comm_config_t&, int&, int&)> change;
  };
  static const int32_t nodes[] = {0, 0, 1};
  const Case cases[] = {
      {"host_threads", [](auto& config, int&, int&) { config.host_threads = 3; }},
      {"require_prepare", [](auto& config, int&, int&) { config.require_prepare = 1; }},
      {"max_workspace_bytes", [](auto& config, int&, int&) { config.max_workspace_bytes = 1 << 30; }},
      {"wait_timeout_ms", [](auto& config, int&, int&) { config.wait_timeout_ms = 77; }},
      {"peer_timeout_ms", [](auto& config, int&, int&) { config.peer_timeout_ms = 7777; }},
      {"transport", [](auto& config, int&, int&) { config.transport = "loopback"; }},
      {"node_of_rank", [](auto& config, int&, int&) { config.node_of_rank = nodes; }},
      {"one of 4 ranks", [](auto&, int& nranks, int&) { nranks = 4; }},
      {"rank 1", [](auto&, int&, int& rank) { rank = 1; }},
  };
  for (const Case& each : cases) {
    const auto outcomes = init(each.change);
    INFO(each.field << "\n" << text_of(outcomes));
    CHECK(all_answer(outcomes, MK_ERROR_MISMATCH));
    for (const Outcome& outcome : outcomes) CHECK(outcome.says(each.field));
  }
}

TEST_CASE("an id serves one job") {
  mk_unique_id_t first, second;
  REQUIRE(mk_get_unique_id(&first) == MK_SUCCESS);
  REQUIRE(mk_get_unique_id(&second) == MK_SUCCESS);
  const auto start = [](const mk_unique_id_t& id, int64_t timeout_ms) {
    std::vector<mk_comm_t> comms(2, nullptr);
    std::vector<Outcome> outcomes(2);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < 2; ++rank) {
      threads.emplace_back([&, rank] {
        mk_comm_config_t config = MK_COMM_CONFIG_INIT;
        config.device = MK_DEVICE_HOST;
        config.init_timeout_ms = timeout_ms;
        const auto slot = static_cast<size_t>(rank);
        const mk_status_t status = mk_comm_init(&comms[slot], &id, 2, rank, &config);
        outcomes[slot] = {status, status == MK_SUCCESS ? "" : mk_get_last_error(nullptr)};
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (mk_comm_t comm : comms) {
      if (comm != nullptr) mk_comm_destroy(comm);
    }
    return outcomes;
  };
  std::vector<Outcome> other;
  std::thread beside([&] { other = start(second, 20000); });
  const auto one = start(first, 20000);
  beside.join();
  INFO(text_of(one) << text_of(other));
  CHECK(all_answer(one, MK_SUCCESS));
  CHECK(all_answer(other, MK_SUCCESS));
  const auto again = start(first, 700);
  INFO(text_of(again));
  CHECK(all_answer(again, MK_ERROR_NETWORK));
  for (const Outcome& outcome : again) CHECK(outcome.says("root at"));
}

TEST_CASE("environment variables and the log") {
  std::set<std::string> names;
  for (size_t index = 0;; ++index) {
    mk_env_t env = MK_ENV_INIT;
    if (mk_env_get(index, &env) != MK_SUCCESS) {
      CHECK(std::strstr(mk_get_last_error(nullptr), "index") != nullptr);
      break;
    }
    names.insert(env.name);
    CHECK(std::string(env.description) != "");
    REQUIRE(env.default_value != nullptr);
    CHECK((env.value == nullptr || std::string(env.value) == std::getenv(env.name)));
  }
  CHECK(names.count("MK_LOG") == 1);
  CHECK(names.count("MK_SOCKET_IFNAME") == 1);
  CHECK(mk_env_get(0, nullptr) == MK_ERROR_INVALID_ARGUMENT);

  {
    const LogLines lines(MK_LOG_DEBUG);
    CHECK(mk_set_log_callback([](void*, mk_log_level_t, const char*) {}, nullptr,
                              static_cast<mk_log_level_t>(99)) == MK_ERROR_INVALID_ARGUMENT);
    // A callback that was refused has not taken the place of the one before.
    CHECK(mk_get_version(nullptr) == MK_ERROR_INVALID_ARGUMENT);
    CHECK(lines.count({"level: expected"}) == 1);
    CHECK(lines.count({"version: expected a pointer"}) == 1);
    CHECK(lines.all().size() == 2);
  }
  for (int status = 0; status <= 15; ++status) {
    CHECK(std::string(mk_status_string(static_cast<mk_status_t>(status))).rfind("MK_", 0) == 0);
  }
  CHECK(mk_status_string(static_cast<mk_status_t>(-1)) != nullptr);
}
