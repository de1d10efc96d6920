// SPDX-License-Identifier: MIT
// Many ranks as threads under adversity, and objects destroyed in mid-flight. Above all for the sanitizers:
// sources are overwritten as soon as they are complete, targets are read as soon as their immediates are there,
// memory is freed as soon as it is deregistered.
#include <algorithm>
#include <atomic>
#include <barrier>
#include <cstring>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "../support/catch.h"
#include "node.h"

namespace softnic_test {
namespace {

constexpr uint32_t kBlockBytes = 1000;
constexpr uint32_t kBlocks = 8;
constexpr size_t kRanks = 4;
constexpr uint32_t kLaps = 40;

// Every rank sends to the next one, over a queue pair of its own for each direction.
struct Ring {
  std::vector<std::unique_ptr<Node>> out, in;
  std::vector<Contact> targets;
  std::barrier<> lap{static_cast<std::ptrdiff_t>(kRanks)};
  std::atomic<uint32_t> wrong{0};
};

// Takes `count` completions and gives their immediates' sum; Catch2 is not for several threads.
uint32_t take(Node& node, uint32_t count, std::atomic<uint32_t>& wrong) {
  uint32_t sum = 0;
  for (uint32_t index = 0; index < count; ++index) {
    const ibv_wc completion = node.wait();
    if (completion.status != IBV_WC_SUCCESS) ++wrong;
    sum += (completion.wc_flags & IBV_WC_WITH_IMM) != 0 ? completion.imm_data : 0;
  }
  return sum;
}

void run_rank(Ring& ring, size_t rank) {
  Node& out = *ring.out[rank];
  Node& in = *ring.in[rank];
  for (uint32_t lap = 1; lap <= kLaps; ++lap) {
    for (uint32_t block = 0; block < kBlocks; ++block) {
      if (in.receive() != 0) ++ring.wrong;
    }
    std::memset(out.memory.data(), static_cast<int>(lap), kBlocks * kBlockBytes);
    for (uint32_t block = 0; block < kBlocks; ++block) {
      if (out.write(ring.targets[rank], block * kBlockBytes, kBlockBytes, lap, block) != 0) ++ring.wrong;
    }
    take(out, kBlocks, ring.wrong);
    std::memset(out.memory.data(), 0, kBlocks * kBlockBytes);
    if (take(in, kBlocks, ring.wrong) != kBlocks * (kBlocks - 1) / 2) ++ring.wrong;
    for (size_t index = 0; index < kBlocks * kBlockBytes; ++index) {
      if (in.memory[index] != static_cast<std::byte>(lap)) ++ring.wrong;
    }
    ring.lap.arrive_and_wait();
  }
}

void run_ring() {
  Ring ring;
  for (size_t rank = 0; rank < kRanks; ++rank) {
    ring.out.push_back(std::make_unique<Node>());
    ring.in.push_back(std::make_unique<Node>());
  }
  for (size_t rank = 0; rank < kRanks; ++rank) {
    Node& target = *ring.in[(rank + 1) % kRanks];
    ring.targets.push_back(target.contact());
    REQUIRE(ring.out[rank]->connect(target.contact()) == 0);
    REQUIRE(target.connect(ring.out[rank]->contact()) == 0);
    ring.out[rank]->handle_for(target.contact());
  }
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < kRanks; ++rank) threads.emplace_back([&ring, rank] { run_rank(ring, rank); });
  for (std::thread& thread : threads) thread.join();
  CHECK(ring.wrong == 0);
}

}  // namespace

TEST_CASE("a ring of ranks, in order") {
  for (const char* kind : {"ib", "roce", "efa"}) {
    const Environment environment{{"KIND", kind}};
    run_ring();
  }
}

TEST_CASE("a ring of ranks, under adversity") {
  for (const char* kind : {"ib", "efa"}) {
    const Environment environment{{"KIND", kind}, {"SEED", "17"}};
    run_ring();
  }
}

TEST_CASE("after a queue pair is destroyed nobody reads its memory") {
  for (const char* kind : {"ib", "efa"}) {
    const Environment environment{{"KIND", kind}, {"SEED", "23"}, {"ADVERSITY", "place=1"}};
    for (int repetition = 0; repetition < 20; ++repetition) {
      NodeOptions options;
      options.bytes = 1 << 18;
      auto a = std::make_unique<Node>(options);
      Node b(options);
      const Contact to_b = b.contact();
      REQUIRE(a->connect(to_b) == 0);
      REQUIRE(b.connect(a->contact()) == 0);
      std::fill(a->memory.begin(), a->memory.end(), std::byte{1});
      for (int count = 0; count < 4; ++count) REQUIRE(a->write(to_b, 0, 1 << 18) == 0);
      for (int turn = 0; turn < repetition; ++turn) std::this_thread::yield();
      a->destroy_qp();
      // What is still read now would arrive as a 2.
      std::fill(a->memory.begin(), a->memory.end(), std::byte{2});
      a.reset();
      CHECK(std::find(b.memory.begin(), b.memory.end(), std::byte{2}) == b.memory.end());
    }
  }
}

TEST_CASE("after memory is deregistered nobody writes to it") {
  for (const char* kind : {"ib", "efa"}) {
    const Environment environment{{"KIND", kind}};
    for (int repetition = 0; repetition < 20; ++repetition) {
      NodeOptions options;
      options.bytes = 1 << 21;
      Pair pair(options);
      std::fill(pair.a.memory.begin(), pair.a.memory.end(), std::byte{1});
      for (int count = 0; count < 4; ++count) REQUIRE(pair.a.write(pair.to_b, 0, 1 << 21) == 0);
      for (int turn = 0; turn < repetition; ++turn) std::this_thread::yield();
      ibv_mr* const region = std::exchange(pair.b.mr, nullptr);
      REQUIRE(ibv_dereg_mr(region) == 0);
      // Freed memory shows a late write to the sanitizers; this shows it without them.
      std::fill(pair.b.memory.begin(), pair.b.memory.end(), std::byte{3});
      for (int count = 0; count < 4; ++count) {
        const ibv_wc_status status = pair.a.wait().status;
        CHECK((status == IBV_WC_SUCCESS || status == IBV_WC_REM_ACCESS_ERR || status == IBV_WC_WR_FLUSH_ERR));
      }
      CHECK(std::find(pair.b.memory.begin(), pair.b.memory.end(), std::byte{1}) == pair.b.memory.end());
    }
  }
}

}  // namespace softnic_test
