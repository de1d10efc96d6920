// SPDX-License-Identifier: MIT
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <numeric>

#include "errors.h"
#include "rank_group.h"
#include "rank_processes.h"
#include "test/support/catch.h"

using namespace perf;
using Clock = std::chrono::steady_clock;

namespace {

const auto kNothing = [] {};

// A child leaves without the exit handlers of the test's runner.
int leave(int code, std::string& text) {
  if (!text.empty()) return code;
  _exit(code);
}

}  // namespace

TEST_CASE("ranks meet and find the maximum of more values than a slot holds") {
  SharedMemory memory(3);
  const auto body = [&](int rank, std::string& text) {
    const auto group = make_shared_memory_group(memory, rank);
    for (int round = 0; round < 50; ++round) group->barrier();
    std::vector<double> values(600);
    std::iota(values.begin(), values.end(), 0.0);
    values[static_cast<size_t>(299 + rank)] = 1000 + rank;
    const std::vector<double> largest = group->maximum(values);
    const bool right = largest[0] == 0 && largest[299] == 1000 && largest[300] == 1001 &&
                       largest[301] == 1002 && largest[599] == 599 && largest.size() == 600;
    return leave(right ? 0 : 1, text);
  };
  for (const RankOutcome& outcome : run_rank_processes(3, 5000, body, kNothing)) {
    CHECK(outcome.exit_code == 0);
    CHECK(outcome.killed_by == 0);
  }
}

TEST_CASE("a rank that dies frees those that wait for it") {
  SharedMemory memory(3);
  const auto start = Clock::now();
  const auto body = [&](int rank, std::string& text) {
    if (rank == 1) raise(SIGKILL);
    try {
      make_shared_memory_group(memory, rank)->barrier();
    } catch (const RunError& error) {
      text = error.what();
    }
    return 1;
  };
  const auto outcomes = run_rank_processes(3, 30000, body, [&] { memory.abandon(); });
  CHECK(outcomes[1].killed_by == SIGKILL);
  CHECK(outcomes[1].order == 0);
  CHECK(outcomes[0].text == "gave up: another rank has ended");
  CHECK(outcomes[2].text == "gave up: another rank has ended");
  CHECK(Clock::now() - start < std::chrono::seconds(10));
  CHECK(report_failures(outcomes) == kExitFailure);
}

TEST_CASE("a rank that does not end after another has failed is killed") {
  const auto start = Clock::now();
  const auto body = [](int rank, std::string& text) {
    if (rank == 0) text = "broken";
    while (rank == 1) pause();
    return 1;
  };
  const auto outcomes = run_rank_processes(2, 300, body, kNothing);
  CHECK(outcomes[0].text == "broken");
  CHECK(outcomes[1].straggler);
  CHECK(outcomes[1].killed_by == SIGKILL);
  CHECK(Clock::now() - start < std::chrono::seconds(10));
}

TEST_CASE("the exit code of the whole") {
  const RankOutcome fine;
  RankOutcome usage;
  usage.exit_code = kExitUsage;
  usage.text = "test sentence: usage";
  RankOutcome failure;
  failure.exit_code = kExitFailure;
  failure.text = "test sentence: failure";
  CHECK(report_failures({fine, fine}) == kExitSuccess);
  CHECK(report_failures({usage, usage}) == kExitUsage);
  CHECK(report_failures({fine, failure}) == kExitFailure);
  CHECK(report_failures({usage, failure}) == kExitFailure);
}
