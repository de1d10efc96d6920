// SPDX-License-Identifier: MIT
// What a wait whose deadline has passed says, word for word.
#include "kernels/wait_report.h"

#include "test/support/catch.h"
#include "test/support/local_exchange.h"

using namespace mk;

namespace {

struct Reported {
  mk_async_error_t error;
  std::string sentence;
};

Reported report(const WaitReport& wait) {
  const Topology topology;
  test::LocalExchange exchange(1);
  AbortToken abort;
  Reported reported{};
  mk_comm_config_t config = MK_COMM_CONFIG_INIT;
  config.wait_timeout_ms = 400;
  const ExecutorContext context{topology,
                                exchange.of(0),
                                abort,
                                nullptr,
                                config,
                                {},
                                {},
                                [&](const mk_async_error_t& error, const std::string& sentence) {
                                  reported = {error, sentence}; },
                                {},
                                {},
                                {}};
  report_timeout(context, wait);
  return reported;
}

constexpr WaitReport kWait{MK_OPERATOR_GEMM_REDUCE_SCATTER, 9, 2, "reduce", "partial", 31, 1, 8, 9};

}  // namespace

TEST_CASE("a wait on a GPU names its CTA") {
  WaitReport wait = kWait;
  wait.cta = 17;
  CHECK(
      report(wait).sentence ==
      "rank 2, role reduce, CTA 17, waited 400 ms in gemm_reduce_scatter (launch 9) for partial 31 of rank 1: "
      "saw 8, expected 9. That rank has entered the launch but does not go on; look at its own error, or raise "
      "wait_timeout_ms");
  wait.cta = 0;
  CHECK(report(wait).sentence.find("role reduce, CTA 0, waited") != std::string::npos);
}

TEST_CASE("a wait on the host executor has none") {
  CHECK(report(kWait).sentence ==
        "rank 2, role reduce, waited 400 ms in gemm_reduce_scatter (launch 9) for partial 31 of rank 1: saw 8, "
        "expected 9. That rank has entered the launch but does not go on; look at its own error, or raise "
        "wait_timeout_ms");
}

TEST_CASE("a wait for the network blames no rank") {
  WaitReport wait = kWait;
  wait.peer = -1;
  const Reported reported = report(wait);
  CHECK(reported.sentence.find("for partial 31: saw 8") != std::string::npos);
  CHECK(reported.sentence.find("The network does not complete what this rank has posted") != std::string::npos);
  CHECK(reported.error.rank == -1);
}

TEST_CASE("the error's fields are those of the wait") {
  const mk_async_error_t error = report(kWait).error;
  CHECK(error.status == MK_ERROR_TIMEOUT);
  CHECK(error.op == MK_OPERATOR_GEMM_REDUCE_SCATTER);
  CHECK(error.rank == 1);
  CHECK(error.waiter_rank == 2);
  CHECK(error.epoch == 9);
  CHECK(error.object_index == 31);
  CHECK(error.seen == 8);
  CHECK(error.expected == 9);
  CHECK(std::string(error.role) == "reduce");
  CHECK(std::string(error.object) == "partial");
}
