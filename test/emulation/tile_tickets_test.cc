// SPDX-License-Identifier: MIT
// A CTA's feed of tiles, whose sides are threads.
#include "shim/device_words.h"

#include <atomic>
#include <chrono>
#include <memory>
#include <thread>
#include <vector>

#include "../support/catch.h"
#include "kernels/device/tile_tickets.cuh"

using namespace mk;

TEST_CASE("a feed brings tiles in their order to a producer and to consumers that are stages behind") {
  constexpr uint32_t NUM_TILES = 200;
  constexpr uint32_t NUM_BEHIND = 5;
  const auto feed = std::make_unique<TileFeed>();
  feed_init(*feed);
  const auto tile_of = [](uint32_t ordinal) { return static_cast<int>(ordinal * 7 + 3); };
  std::atomic<uint32_t> num_consumed[2] = {0, 0};
  std::atomic<int> num_wrong = 0, num_too_early = 0;
  std::atomic<uint32_t> num_begun = 0;
  std::vector<std::thread> threads;
  threads.emplace_back([&] {
    for (uint32_t ordinal = 0; ordinal < NUM_TILES; ++ordinal) {
      await_near(*feed, ordinal);
      if (ordinal > num_begun) ++num_too_early;
      feed_tile(*feed, ordinal, tile_of(ordinal));
    }
    feed_tile(*feed, NUM_TILES, NO_TILE);
  });
  threads.emplace_back([&] {
    int tile = 0;
    for (uint32_t ordinal = 0; (tile = next_tile(*feed, ordinal)) != NO_TILE; ++ordinal) {
      if (tile != tile_of(ordinal)) ++num_wrong;
      for (const std::atomic<uint32_t>& consumed : num_consumed) {
        while (consumed + NUM_BEHIND < ordinal) std::this_thread::yield();
      }
      num_begun = ordinal + 1;
      near_end(*feed, ordinal);
    }
  });
  for (std::atomic<uint32_t>& consumed : num_consumed) {
    threads.emplace_back([&] {
      int tile = 0;
      for (uint32_t ordinal = 0; (tile = next_tile(*feed, ordinal)) != NO_TILE; ++ordinal) {
        if (tile != tile_of(ordinal)) ++num_wrong;
        consumed = ordinal + 1;
        if (ordinal % 64 == 0) std::this_thread::sleep_for(std::chrono::microseconds(20));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(num_wrong == 0);
  CHECK(num_too_early == 0);
  CHECK(num_consumed[0] == NUM_TILES);
  CHECK(num_consumed[1] == NUM_TILES);
}
