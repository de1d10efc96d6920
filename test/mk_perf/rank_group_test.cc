// SPDX-License-Identifier: MIT
#include "rank_group.h"

#include <cstring>
#include <thread>

#include "test/support/catch.h"

using namespace perf;

TEST_CASE("ranks gather bytes and agree on the largest value") {
  constexpr int kRanks = 4;
  SharedMemory shared(kRanks);
  std::vector<std::vector<char>> gathered(kRanks);
  std::vector<std::vector<double>> largest(kRanks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      const auto at = static_cast<size_t>(rank);
      const std::unique_ptr<RankGroup> group = make_shared_memory_group(shared, rank);
      for (int round = 0; round < 20; ++round) {
        const std::vector<char> own(RankGroup::kMaxGathered, static_cast<char>('a' + rank + round));
        gathered[at] = group->all_gather(own.data(), own.size());
        largest[at] = group->maximum({static_cast<double>(rank), static_cast<double>(-rank)});
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::vector<char> expected;
  for (int rank = 0; rank < kRanks; ++rank)
    expected.insert(expected.end(), RankGroup::kMaxGathered, static_cast<char>('a' + rank + 19));
  for (size_t rank = 0; rank < kRanks; ++rank) {
    CHECK(gathered[rank] == expected);
    CHECK(largest[rank] == std::vector<double>{3, 0});
  }
}
