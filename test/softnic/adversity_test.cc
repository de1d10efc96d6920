// SPDX-License-Identifier: MIT
// Seeded adversity: legal disorder loses nothing and breaks no promise, and is there at all; faults are what
// they are called.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "../support/catch.h"
#include "node.h"

namespace softnic_test {
namespace {

using std::chrono::steady_clock;

// Slots of the memory, each filled with a number of its own by each write.
constexpr uint32_t kSlots = 32;
constexpr uint32_t kSlotBytes = 512;

void stamp(Node& node, uint32_t slot, uint32_t number) {
  uint32_t* const words = reinterpret_cast<uint32_t*>(node.memory.data() + slot * kSlotBytes);
  std::fill(words, words + kSlotBytes / 4, number);
}

bool holds(const Node& node, uint32_t slot, uint32_t number) {
  const uint32_t* const words = reinterpret_cast<const uint32_t*>(node.memory.data() + slot * kSlotBytes);
  return std::all_of(words, words + kSlotBytes / 4, [&](uint32_t word) { return word == number; });
}

struct Flow {
  uint32_t wrong = 0;  // bytes that were not there when their immediate was
  uint32_t failed = 0;
  std::vector<uint32_t> order;  // immediates as they came
};

// Writes `rounds` times all slots, each with an immediate that names it; looks at the bytes when it comes.
Flow run_flow(Pair& pair, uint32_t rounds) {
  Flow flow;
  for (uint32_t slot = 0; slot < kSlots; ++slot) REQUIRE(pair.b.receive() == 0);
  for (uint32_t round = 0; round < rounds; ++round) {
    for (uint32_t slot = 0; slot < kSlots; ++slot) {
      stamp(pair.a, slot, round * kSlots + slot + 1);
      REQUIRE(pair.a.write(pair.to_b, slot * kSlotBytes, kSlotBytes, slot, round * kSlots + slot) == 0);
    }
    for (uint32_t count = 0; count < kSlots; ++count) {
      const ibv_wc arrival = pair.b.wait();
      REQUIRE(arrival.status == IBV_WC_SUCCESS);
      flow.order.push_back(arrival.imm_data);
      flow.wrong += holds(pair.b, arrival.imm_data % kSlots, arrival.imm_data + 1) ? 0 : 1;
      REQUIRE(pair.b.receive() == 0);
    }
    for (uint32_t count = 0; count < kSlots; ++count) {
      flow.failed += pair.a.wait().status == IBV_WC_SUCCESS ? 0 : 1;
    }
  }
  return flow;
}

bool is_ordered(const Flow& flow) { return std::is_sorted(flow.order.begin(), flow.order.end()); }

}  // namespace

TEST_CASE("RC under adversity keeps every promise") {
  for (const char* seed : {"1", "2", "3"}) {
    const Environment environment{{"SEED", seed}};
    Pair pair;
    const Flow flow = run_flow(pair, 8);
    CHECK(flow.wrong == 0);
    CHECK(flow.failed == 0);
    CHECK(is_ordered(flow));
  }
}

TEST_CASE("SRD under adversity loses nothing and does reorder") {
  for (const char* seed : {"1", "2", "3"}) {
    const Environment environment{{"KIND", "efa"}, {"SEED", seed}};
    Pair pair;
    Flow flow = run_flow(pair, 8);
    CHECK(flow.wrong == 0);
    CHECK(flow.failed == 0);
    CHECK_FALSE(is_ordered(flow));
    std::sort(flow.order.begin(), flow.order.end());
    for (uint32_t index = 0; index < flow.order.size(); ++index) REQUIRE(flow.order[index] == index);
  }
}

#ifndef __SANITIZE_THREAD__  // it looks at memory that is being written to
// A receiver that trusts the last byte, or a later write's arrival, sees the difference: pieces do come in any
// order.
TEST_CASE("payload is placed in any order, also on RC") {
  const Environment environment{{"ADVERSITY", "place=1"}};
  Pair pair;
  bool last_before_first = false;
  // The memory is looked at while it is written to: through atomics.
  const auto word = [&](size_t offset) -> std::atomic_ref<uint64_t> {
    return std::atomic_ref<uint64_t>(*reinterpret_cast<uint64_t*>(pair.b.memory.data() + offset));
  };
  constexpr uint32_t kBytes = 32768;
  const auto deadline = steady_clock::now() + std::chrono::seconds(20);
  for (uint64_t number = 1; steady_clock::now() < deadline && !last_before_first; ++number) {
    uint64_t* const words = reinterpret_cast<uint64_t*>(pair.a.memory.data());
    std::fill(words, words + kBytes / 8, number);
    REQUIRE(pair.a.write(pair.to_b, 0, kBytes, number) == 0);
    std::optional<ibv_wc> done;
    while (!done) {
      done = pair.a.poll();
      last_before_first = last_before_first || (word(kBytes - 8) == number && word(0) != number);
    }
    REQUIRE(done->status == IBV_WC_SUCCESS);
  }
  CHECK(last_before_first);
}
#endif

TEST_CASE("a seed decides what fails") {
  std::vector<std::vector<uint64_t>> failed;
  for (const char* seed : {"5", "5", "6"}) {
    const Environment environment{{"KIND", "efa"}, {"SEED", seed}, {"ADVERSITY", "error=0.2:19"}};
    Pair pair;
    failed.emplace_back();
    for (uint64_t number = 0; number < 100; ++number) {
      REQUIRE(pair.a.write(pair.to_b, 0, 8, number) == 0);
      const ibv_wc completion = pair.a.wait();
      if (completion.status == IBV_WC_SUCCESS) continue;
      CHECK(completion.status == IBV_WC_FATAL_ERR);
      failed.back().push_back(number);
    }
    CHECK(failed.back().size() > 5);
    CHECK(failed.back().size() < 50);
  }
  CHECK(failed[0] == failed[1]);
  CHECK(failed[0] != failed[2]);
}

TEST_CASE("RC: an error completion puts the queue pair in error") {
  const Environment environment{{"ADVERSITY", "error=1:12"}};
  Pair pair;
  for (uint64_t number = 0; number < 3; ++number) REQUIRE(pair.a.write(pair.to_b, 0, 8, number) == 0);
  CHECK(pair.a.wait().status == IBV_WC_RETRY_EXC_ERR);
  CHECK(pair.a.wait().status == IBV_WC_WR_FLUSH_ERR);
  CHECK(pair.a.wait().status == IBV_WC_WR_FLUSH_ERR);
}

TEST_CASE("a queue pair fails in mid-flight") {
  const Environment environment{{"SEED", "3"}, {"ADVERSITY", "qp_fatal=0.05"}};
  Pair pair;
  bool flushed = false;
  uint64_t number = 0;
  for (; number < 200 && !flushed; ++number) {
    REQUIRE(pair.a.write(pair.to_b, 0, 64, number) == 0);
    flushed = pair.a.wait().status == IBV_WC_WR_FLUSH_ERR;
  }
  CHECK(flushed);
  CHECK(number > 1);
  const std::optional<ibv_async_event> event = pair.a.event(1000);
  REQUIRE(event.has_value());
  CHECK(event->event_type == IBV_EVENT_QP_FATAL);
}

TEST_CASE("a NIC vanishes, a port goes down, a device dies: the peer gets no answer") {
  struct Case {
    const char* name;
    std::optional<ibv_event_type> event;
  };
  for (const Case& fault : {Case{"vanish=1", {}}, Case{"port_down=1", IBV_EVENT_PORT_ERR},
                            Case{"device_fatal=1", IBV_EVENT_DEVICE_FATAL}}) {
    const Environment environment{{"ADVERSITY", fault.name}, {"TIMEOUT_DIVISOR", "10000"}};
    Pair pair;
    REQUIRE(pair.a.write(pair.to_b, 0, 8) == 0);
    CHECK(pair.a.wait().status == IBV_WC_RETRY_EXC_ERR);
    const std::optional<ibv_async_event> event = pair.a.event(fault.event ? 1000 : 0);
    REQUIRE(event.has_value() == fault.event.has_value());
    if (event) CHECK(event->event_type == *fault.event);
  }
}

TEST_CASE("rate and latency are those of the variables") {
  const Environment environment{{"RATE_GBPS", "0.8"}, {"LATENCY_US", "5000"}};
  NodeOptions options;
  options.bytes = 1 << 20;
  Pair pair(options);
  const auto begin = steady_clock::now();
  for (int count = 0; count < 4; ++count) REQUIRE(pair.a.write(pair.to_b, 0, 1 << 20) == 0);
  for (int count = 0; count < 4; ++count) REQUIRE(pair.a.wait().status == IBV_WC_SUCCESS);
  const double milliseconds = std::chrono::duration<double, std::milli>(steady_clock::now() - begin).count();
  // 4 MiB at 0.1 GB/s, and there and back.
  CHECK(milliseconds >= 41.9 + 10);
  CHECK(milliseconds < 5000);
}

TEST_CASE("late completions and delays cost time and nothing else") {
  const Environment environment{{"SEED", "9"}, {"ADVERSITY", "late=0.3:2000,delay=0.3:2000,rnr=0.2"}};
  Pair pair;
  const Flow flow = run_flow(pair, 4);
  CHECK(flow.wrong == 0);
  CHECK(flow.failed == 0);
  CHECK(is_ordered(flow));
}

}  // namespace softnic_test
