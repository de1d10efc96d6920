// SPDX-License-Identifier: MIT
// What CudaRank does between nodes before there are launches, on emulated GPUs over the real transports.
#include "shim/device_words.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <vector>

#include "../support/catch.h"
#include "emulated_gpu.h"

namespace mk::test {

// A completion is the sender's alone: first puts can arrive when their receiver's launches have begun.
TEST_CASE("an arena's banks are its launches' alone, however late the network's first puts arrive",
          "[emulation]") {
  constexpr int kArenas = 20;
  constexpr size_t kBankBytes = 4096;
  constexpr std::byte kLaunchData{0xab};
  const std::vector<int> nodes = {0, 0, 1, 2};
  for (const BackendCase& backend : fewer_if_slow(backend_cases())) {
    INFO(backend.backend << " seed " << backend.seed << " " << backend.environment);
    CHECK(run_ranks(RankKind::threads, backend, nodes, [&](Rank& rank) -> std::string {
            EmulatedGpu gpu(rank);
            MK_EXPECT_OK(gpu.set_up(1, kBankBytes));
            std::vector<std::byte*> arenas;
            for (int i = 0; i < kArenas; ++i) {
              MK_EXPECT_OK(gpu.add_arena(kBankBytes));
              std::byte* const banks = std::min(gpu.area(0, 0), gpu.area(1, 0));
              std::fill_n(banks, 2 * kBankBytes, kLaunchData);
              arenas.push_back(banks);
            }
            MK_EXPECT(rank.barrier());
            std::this_thread::sleep_for(std::chrono::milliseconds(20));
            for (const std::byte* banks : arenas) {
              MK_EXPECT(std::count(banks, banks + 2 * kBankBytes, kLaunchData) == 2 * kBankBytes);
            }
            MK_EXPECT(rank.barrier());
            return rank.failure();
          }) == "");
  }
}

}  // namespace mk::test
