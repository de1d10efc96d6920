// SPDX-License-Identifier: MIT
// Arguments that one rank gets wrong: a status and a sentence at once, without any other rank, and the
// communicator goes on.
#include <cstdint>
#include <cstring>
#include <random>

#include "test/multi_rank/bad_arguments.h"
#include "test/multi_rank/exact_call.h"
#include "test/support/catch.h"

using namespace mk::test;

namespace {

// A call that all ranks make together and that has to succeed; "" or what went wrong.
std::string run_good_call(ThreadJob& job, uint64_t seed, mk_operator_t op = MK_OPERATOR_ALLGATHER_GEMM) {
  std::vector<std::string> wrong(static_cast<size_t>(job.nranks()));
  const auto outcomes = job.each([&](int rank, mk_comm_t comm) {
    ExactCall call(op, job.nranks(), rank, seed);
    return run_exact_call(comm, call, wrong[static_cast<size_t>(rank)]);
  });
  if (!all_answer(outcomes, MK_SUCCESS)) return text_of(outcomes);
  for (const std::string& text : wrong) {
    if (!text.empty()) return text;
  }
  return "";
}

void check_answer(const BadCall& bad, const Outcome& outcome) {
  INFO(bad.name << ": " << text_of(outcome));
  CHECK(outcome.status == bad.expected);
  for (const std::string& text : bad.says) {
    INFO("should say \"" << text << '"');
    CHECK(outcome.says(text));
  }
}

void check_calls(ThreadJob& job, const std::vector<BadCall>& calls) {
  uint64_t seed = 0;
  for (const BadCall& bad : calls) {
    const int rank = static_cast<int>(seed % static_cast<uint64_t>(job.nranks()));
    check_answer(bad, job.on(rank, [&](int, mk_comm_t comm) { return bad.call(comm); }));
    INFO("after " << bad.name);
    REQUIRE(run_good_call(job, ++seed) == "");
  }
}

}  // namespace

TEST_CASE("bad arguments of the GEMM operators") {
  ThreadJob job(JobOptions(node_layout(2, 1)));
  REQUIRE(failures(job.started()) == "");
  check_calls(job, bad_gemm_calls());
  REQUIRE(all_answer(job.finalize(), MK_SUCCESS));
}

TEST_CASE("bad arguments of ring attention") {
  ThreadJob job(JobOptions(node_layout(2, 1)));
  REQUIRE(failures(job.started()) == "");
  check_calls(job, bad_attention_calls());
  REQUIRE(all_answer(job.finalize(), MK_SUCCESS));
}

TEST_CASE("bad arguments of the mixture-of-experts operators") {
  ThreadJob job(JobOptions(node_layout(3, 2)));
  REQUIRE(failures(job.started()) == "");
  check_calls(job, bad_moe_calls());
  for (const BadCall& call : bad_routing_bytes_calls()) {
    const mk_status_t status = call.call(nullptr);
    check_answer(call, {status, mk_get_last_error(nullptr)});
  }
  REQUIRE(all_answer(job.finalize(), MK_SUCCESS));
}

TEST_CASE("bad arguments of the other functions") {
  ThreadJob job(JobOptions(node_layout(3, 2)));
  REQUIRE(failures(job.started()) == "");
  check_calls(job, bad_memory_calls());
  check_calls(job, bad_query_calls());
  REQUIRE(all_answer(job.finalize(), MK_SUCCESS));
}

TEST_CASE("handles that name no communicator") {
  for (const mk_comm_t bad : {static_cast<mk_comm_t>(nullptr), reinterpret_cast<mk_comm_t>(0x1000001),
                              reinterpret_cast<mk_comm_t>(UINTPTR_MAX)}) {
    for (const BadCall& call : bad_handle_calls()) {
      const mk_status_t status = call.call(bad);
      check_answer(call, {status, mk_get_last_error(nullptr)});
    }
  }
}

// Nothing can be run at such sizes, but the planner has to survive being asked.
TEST_CASE("the largest sizes that are allowed") {
  ThreadJob job(JobOptions(node_layout(3, 2)));
  REQUIRE(failures(job.started()) == "");
  constexpr int64_t most = int64_t{1} << 44;
  const int64_t shapes[][3] = {
      {most, 1, 1}, {1, most, 1}, {1, 1, most}, {most, 0, 0}, {int64_t{1} << 33, 1, 2}};
  for (const auto& [m, n, k] : shapes) {
    for (const int64_t chunk_bytes : {0, 1, 1 << 30}) {
      INFO("m " << m << ", n " << n << ", k " << k << ", chunk_bytes " << chunk_bytes);
      mk_tuning_t tuning = MK_TUNING_INIT;
      tuning.chunk_bytes = chunk_bytes;
      mk_gemm_maxima_t maxima = MK_GEMM_MAXIMA_INIT;
      maxima.m = m, maxima.n = n, maxima.k = k, maxima.tuning = &tuning;
      for (const auto workspace_bytes :
           {mk_allgather_gemm_workspace_bytes, mk_gemm_reduce_scatter_workspace_bytes,
            mk_gemm_allreduce_workspace_bytes}) {
        size_t bytes = 0;
        const mk_status_t status = workspace_bytes(job.comm(1), &maxima, &bytes);
        if (status != MK_SUCCESS) {
          INFO(mk_get_last_error(job.comm(1)));
          CHECK((status == MK_ERROR_UNSUPPORTED || status == MK_ERROR_INVALID_ARGUMENT));
        } else {
          CHECK(bytes <= size_t{1} << 54);
        }
      }
      mk_allgather_gemm_args_t args = MK_ALLGATHER_GEMM_ARGS_INIT;
      args.m = m, args.n = n, args.k = k, args.tuning = &tuning;
      mk_plan_t plan = MK_PLAN_INIT;
      if (mk_allgather_gemm_plan(job.comm(1), &args, &plan) != MK_SUCCESS) continue;
      CHECK(plan.chunk_rows > 0);
      CHECK(int64_t{plan.chunk_rows} * plan.num_chunks >= (m + 2) / 3);
    }
  }
  REQUIRE(run_good_call(job, 1) == "");
  REQUIRE(all_answer(job.finalize(), MK_SUCCESS));
}

// State must not drift: errors and good calls in turn, at random, over several operators.
TEST_CASE("bad arguments and good calls in turn") {
  const int nranks = GENERATE(2, 3, 5);
  const int num_nodes = GENERATE(1, 2);
  ThreadJob job(JobOptions(node_layout(nranks, num_nodes)));
  REQUIRE(failures(job.started()) == "");
  std::vector<BadCall> calls = bad_gemm_calls();
  for (const auto& more : {bad_attention_calls(), bad_moe_calls(), bad_memory_calls(), bad_query_calls()}) {
    calls.insert(calls.end(), more.begin(), more.end());
  }
  std::mt19937_64 random(static_cast<uint64_t>(nranks * 10 + num_nodes));
  for (uint64_t turn = 0; turn < 50; ++turn) {
    const BadCall& bad = calls[random() % calls.size()];
    const int rank = static_cast<int>(random() % static_cast<uint64_t>(nranks));
    INFO("turn " << turn << ", " << bad.name << " on rank " << rank);
    check_answer(bad, job.on(rank, [&](int, mk_comm_t comm) { return bad.call(comm); }));
    REQUIRE(run_good_call(job, turn, static_cast<mk_operator_t>(1 + turn % 3)) == "");
  }
  mk_comm_info_t info = MK_COMM_INFO_INIT;
  REQUIRE(mk_comm_get_info(job.comm(0), &info) == MK_SUCCESS);
  CHECK(info.epoch == 50);
  CHECK(info.prepared == (1 << 1 | 1 << 2 | 1 << 3));
  REQUIRE(all_answer(job.finalize(), MK_SUCCESS));
}

namespace {

// mk_comm_init with one thing wrong, which needs no other rank.
struct BadInit {
  const char* name;
  mk_status_t expected;
  std::vector<std::string> says;
  std::function<void(mk_comm_config_t&)> change;
};

Outcome init_alone(const mk_comm_config_t& config, int nranks = 1, int rank = 0) {
  mk_unique_id_t id;
  if (mk_get_unique_id(&id) != MK_SUCCESS) return {MK_ERROR_INTERNAL, mk_get_last_error(nullptr)};
  mk_comm_t comm = nullptr;
  const mk_status_t status = mk_comm_init(&comm, &id, nranks, rank, &config);
  if (status == MK_SUCCESS) {
    mk_comm_destroy(comm);
    return {};
  }
  return {status, comm == nullptr ? mk_get_last_error(nullptr) : "the communicator is not NULL"};
}

std::vector<BadInit> bad_inits() {
  const auto invalid = MK_ERROR_INVALID_ARGUMENT;
  return {
      {"struct_size", invalid, {"config.struct_size", "saw 4"}, [](auto& c) { c.struct_size = 4; }},
      {"device", invalid, {"config.device", "saw 9"}, [](auto& c) { c.device = static_cast<mk_device_t>(9); }},
      {"cuda_device", invalid, {"config.cuda_device", "-2"}, [](auto& c) { c.cuda_device = -2; }},
      {"transport",
       invalid,
       {"config.transport", "expected one of", "\"RC\""},
       [](auto& c) { c.transport = "RC"; }},
      {"transport",
       invalid,
       {"config.transport", "xxx"},
       [](auto& c) {
         static const std::string long_name(1000000, 'x');
         c.transport = long_name.c_str();
       }},
      {"host_threads", invalid, {"config.host_threads", "-1"}, [](auto& c) { c.host_threads = -1; }},
      {"host_threads", invalid, {"config.host_threads", "9999"}, [](auto& c) { c.host_threads = 9999; }},
      {"max_ctas", invalid, {"config.max_ctas", "-1"}, [](auto& c) { c.max_ctas = -1; }},
      {"reserved_sms", invalid, {"config.reserved_sms", "-1"}, [](auto& c) { c.reserved_sms = -1; }},
      {"require_prepare", invalid, {"config.require_prepare", "saw 2"}, [](auto& c) { c.require_prepare = 2; }},
      {"init_timeout_ms", invalid, {"config.init_timeout_ms", "-5"}, [](auto& c) { c.init_timeout_ms = -5; }},
      {"wait_timeout_ms", invalid, {"config.wait_timeout_ms", "-5"}, [](auto& c) { c.wait_timeout_ms = -5; }},
      {"peer_timeout_ms",
       invalid,
       {"config.peer_timeout_ms", "9223372036854775807"},
       [](auto& c) { c.peer_timeout_ms = INT64_MAX; }},
  };
}

}  // namespace

TEST_CASE("bad arguments of mk_comm_init") {
  mk_comm_config_t good = MK_COMM_CONFIG_INIT;
  good.device = MK_DEVICE_HOST;
  for (const BadInit& bad : bad_inits()) {
    mk_comm_config_t config = good;
    bad.change(config);
    check_answer({bad.name, bad.expected, bad.says, nullptr}, init_alone(config));
  }
  check_answer({"nranks 0", MK_ERROR_INVALID_ARGUMENT, {"nranks", "saw 0"}, nullptr}, init_alone(good, 0));
  check_answer({"nranks -3", MK_ERROR_INVALID_ARGUMENT, {"nranks", "-3"}, nullptr}, init_alone(good, -3));
  check_answer({"too many ranks", MK_ERROR_INVALID_ARGUMENT, {"nranks", "1000000"}, nullptr},
               init_alone(good, 1000000));
  check_answer({"rank -1", MK_ERROR_INVALID_ARGUMENT, {"rank", "-1"}, nullptr}, init_alone(good, 2, -1));
  check_answer({"rank 2 of 2", MK_ERROR_INVALID_ARGUMENT, {"rank", "saw 2"}, nullptr}, init_alone(good, 2, 2));
  REQUIRE(init_alone(good).status == MK_SUCCESS);
}

TEST_CASE("ids that mk_get_unique_id did not make") {
  mk_comm_t comm = reinterpret_cast<mk_comm_t>(0x10);
  mk_unique_id_t id;
  REQUIRE(mk_get_unique_id(&id) == MK_SUCCESS);
  CHECK(mk_comm_init(nullptr, &id, 1, 0, nullptr) == MK_ERROR_INVALID_ARGUMENT);
  CHECK(std::strstr(mk_get_last_error(nullptr), "comm: expected a pointer") != nullptr);
  CHECK(mk_comm_init(&comm, nullptr, 1, 0, nullptr) == MK_ERROR_INVALID_ARGUMENT);
  CHECK(std::strstr(mk_get_last_error(nullptr), "id: expected a pointer") != nullptr);
  CHECK(mk_get_unique_id(nullptr) == MK_ERROR_INVALID_ARGUMENT);
  CHECK(mk_get_version(nullptr) == MK_ERROR_INVALID_ARGUMENT);
  mk_comm_config_t config = MK_COMM_CONFIG_INIT;
  config.device = MK_DEVICE_HOST;
  for (size_t position = 0; position < sizeof id.bytes; ++position) {
    mk_unique_id_t spoilt = id;
    spoilt.bytes[position] ^= 0x10;
    INFO("byte " << position);
    CHECK(mk_comm_init(&comm, &spoilt, 1, 0, &config) == MK_ERROR_INVALID_ARGUMENT);
    CHECK(comm == nullptr);
    CHECK(std::strstr(mk_get_last_error(nullptr), "id: ") != nullptr);
  }
  REQUIRE(mk_comm_init(&comm, &id, 1, 0, &config) == MK_SUCCESS);
  CHECK(mk_comm_destroy(comm) == MK_SUCCESS);
}
