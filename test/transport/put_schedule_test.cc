// SPDX-License-Identifier: MIT
// The weak promise and local completion, for every backend: randomized schedules of puts whose every byte is
// checked.
#include "put_schedule.h"

#include "support/catch.h"

namespace mk::test {
namespace {

std::string connect_and_play(Rank& rank, const PutSchedule& schedule) {
  MK_EXPECT_OK(rank.connect({}));
  const std::string wrong = play(rank, schedule);
  if (!wrong.empty()) return wrong;
  MK_EXPECT(rank.barrier());
  rank.endpoint.reset();
  return rank.failure();
}

}  // namespace

TEST_CASE("puts arrive before their signals, and sources are free once complete", "[transport]") {
  const auto kind = GENERATE(RankKind::threads, RankKind::processes);
  const auto nodes =
      GENERATE(std::vector<int>{0, 1}, std::vector<int>{0, 1, 2, 3}, std::vector<int>{0, 1, 0, 1});
  for (const BackendCase& backend : backend_cases()) {
    INFO("backend " << backend.backend << ", seed " << backend.seed << ", " << nodes.size() << " ranks, "
                    << (kind == RankKind::threads ? "threads" : "processes"));
    PutSchedule schedule;
    schedule.seed = 100 + nodes.size();
    schedule.puts_per_pair = nodes.size() == 2 ? 48 : 16;
    CHECK(run_ranks(kind, backend, nodes, [&](Rank& rank) { return connect_and_play(rank, schedule); }) == "");
  }
}

}  // namespace mk::test
