// SPDX-License-Identifier: MIT
// The weak promise and local completion, for every backend: randomized schedules of puts whose every byte is
// checked.
#include "put_schedule.h"

#include "../support/catch.h"
#include "broken_backend.h"

namespace mk::test {
namespace {

std::string connect_and_play(Rank& rank, const PutSchedule& schedule, std::span<const Backend> choice = {}) {
  EndpointOptions options;
  // Doorbell and descriptors wake the proxy; nothing is left to the bound of its sleep.
  options.idle.sleep = std::chrono::hours(1);
  MK_EXPECT_OK(rank.connect(options, choice));
  const std::string wrong = play(rank, schedule);
  if (!wrong.empty()) return wrong;
  MK_EXPECT(rank.barrier());
  rank.endpoint.reset();
  return rank.failure();
}

}  // namespace

TEST_CASE("puts arrive before their signals, and sources are free once complete", "[transport]") {
  const auto kind = GENERATE(from_range(rank_kinds()));
  const auto nodes =
      GENERATE(std::vector<int>{0, 1}, std::vector<int>{0, 1, 2, 3}, std::vector<int>{0, 1, 0, 1});
  for (const BackendCase& backend : backend_cases()) {
    INFO("backend " << backend.backend << ", seed " << backend.seed << ", " << nodes.size() << " ranks, "
                    << (kind == RankKind::threads ? "threads" : "processes"));
    PutSchedule schedule;
    schedule.seed = 100 + nodes.size();
    schedule.puts_per_pair = nodes.size() == 2 ? 48 : 16;
    if (kThreadSanitizer) schedule.largest_bytes = 300001;
    CHECK(run_ranks(kind, backend, nodes, [&](Rank& rank) { return connect_and_play(rank, schedule); }) == "");
  }
}

// ThreadSanitizer rightly calls what these faults do a data race; the checker must find it without help.
TEST_CASE("the schedule finds broken backends", "[transport]") {
  if (kThreadSanitizer) return;
  const auto fault = GENERATE(Fault::signal_before_data, Fault::completion_before_read, Fault::signal_twice);
  PutSchedule schedule;
  schedule.largest_bytes = 100001;
  const std::string wrong = run_ranks(RankKind::threads, {"loopback", "0"}, {0, 1}, [&](Rank& rank) {
    rank.timeout = std::chrono::seconds(3);
    return connect_and_play(rank, schedule, broken_backend(fault));
  });
  INFO("reported: " << wrong);
  const bool missing_bytes = wrong.find("is there, byte") != std::string::npos;
  const bool miscounted = wrong.find("signals in all") != std::string::npos;
  CHECK((missing_bytes || (fault == Fault::signal_twice && miscounted)));
}

}  // namespace mk::test
