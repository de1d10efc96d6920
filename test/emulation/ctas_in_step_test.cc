// SPDX-License-Identifier: MIT
// CTAs that keep in step, each a thread: how far any may run ahead, and that one which is stuck holds up nobody
// for long.
#include "shim/device_words.h"

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "../support/catch.h"
#include "kernels/device/ctas_in_step.cuh"

namespace {

using namespace mk;
using Clock = std::chrono::steady_clock;

constexpr int NUM_K_STEPS = 20;
constexpr int NEAR_K_STEPS = 4;

// What a producer does, a k-step in no time; before(tile, k_step) comes before each.
template <class Began, class Before>
void produce(const CtasInStep& in_step, int num_tiles, Began&& began, Before&& before) {
  in_step.begin();
  for (int tile = 0; tile < num_tiles; ++tile) {
    in_step.await_others(tile);
    began(tile);
    for (int k_step = 0; k_step < NUM_K_STEPS; ++k_step) {
      before(tile, k_step);
      in_step.at_k_step(k_step, 0, NUM_K_STEPS);
    }
  }
  in_step.leave();
}

}  // namespace

TEST_CASE("no CTA begins a tile before all others are near theirs, until one has left; the count ends as 0") {
  const std::vector<int> num_tiles = {40, 40, 39, 40, 39, 40};
  const int num_ctas = static_cast<int>(num_tiles.size());
  uint32_t num_near = 0;
  for (int launch = 0; launch < 3; ++launch) {
    std::vector<std::atomic<int>> begun(num_tiles.size()), loaded(num_tiles.size());
    std::atomic<int> num_early = 0;
    std::vector<std::thread> threads;
    for (int cta = 0; cta < num_ctas; ++cta) {
      threads.emplace_back([&, cta] {
        produce(
            CtasInStep(&num_near, num_ctas, NEAR_K_STEPS, 60000000000), num_tiles[cta],
            [&](int tile) {
              begun[cta] = tile + 1;
              if (tile >= 39) return;
              for (int other = 0; other < num_ctas; ++other)
                if (loaded[other] < tile * NUM_K_STEPS - NEAR_K_STEPS) ++num_early;
            },
            [&](int tile, int k_step) {
              loaded[cta] = tile * NUM_K_STEPS + k_step;
              // Now one CTA is slow, now another.
              if (tile % num_ctas == cta && k_step == 2)
                std::this_thread::sleep_for(std::chrono::microseconds(20));
            });
        loaded[cta] = num_tiles[cta] * NUM_K_STEPS;
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (int cta = 0; cta < num_ctas; ++cta) CHECK(begun[cta] == num_tiles[cta]);
    CHECK(num_near == 0);
    CHECK(num_early == 0);
  }
}

TEST_CASE("a CTA that is stuck holds up the others for no longer than their patience") {
  uint32_t num_near = 0;
  std::atomic<bool> is_stuck = true;
  std::thread stuck([&] {
    produce(
        CtasInStep(&num_near, 2, NEAR_K_STEPS), 3, [](int) {},
        [&](int tile, int) {
          while (tile == 0 && is_stuck) std::this_thread::yield();
        });
  });
  int num_begun = 0;
  const auto begin = Clock::now();
  produce(
      CtasInStep(&num_near, 2, NEAR_K_STEPS), 3, [&](int) { ++num_begun; }, [](int, int) {});
  const auto waited = Clock::now() - begin;
  CHECK(num_begun == 3);
  CHECK(waited >= std::chrono::microseconds(200));  // 100 at the second and at the third
  CHECK(waited < std::chrono::seconds(10));
  CHECK(num_near != 0);
  is_stuck = false;
  stuck.join();
  CHECK(num_near == 0);
}

TEST_CASE("CTAs that go their own way touch nothing") {
  const CtasInStep in_step(nullptr, 2, 0);
  in_step.begin();
  in_step.await_others(3);
  in_step.at_k_step(0, 0, 1);
  in_step.leave();
  SUCCEED();
}
