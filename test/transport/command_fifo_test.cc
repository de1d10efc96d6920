// SPDX-License-Identifier: MIT
#include "transport/command_fifo.h"

#include <sched.h>
#include <unistd.h>

#include <cstring>
#include <thread>
#include <vector>

#include "../support/catch.h"
#include "lib/deadline.h"

namespace mk {
namespace {

Command numbered(uint64_t producer, uint64_t number) {
  const auto low = static_cast<uint32_t>(number);
  return Command{CommandKind::put, 0, static_cast<uint16_t>(producer), low, number, ~number, low ^ 0x5555u, 0};
}

bool is_numbered(const Command& command, uint64_t producer, uint64_t number) {
  const Command expected = numbered(producer, number);
  return command.kind == expected.kind && command.peer == expected.peer && command.signal == expected.signal &&
         command.source == expected.source && command.target == expected.target &&
         command.bytes == expected.bytes;
}

std::unique_ptr<CommandFifo> make_fifo(uint32_t capacity, uint64_t first_index = 0) {
  auto fifo = CommandFifo::create(capacity, first_index);
  REQUIRE(fifo.ok());
  return fifo.take();
}

// Takes `total` commands of several producers, each producer's in its order.
void take_in_order(CommandFifo& fifo, size_t producers, uint64_t total) {
  std::vector<uint64_t> next(producers, 0);
  const Deadline deadline = Deadline::after(std::chrono::seconds(60));
  for (uint64_t taken = 0; taken < total && !deadline.passed();) {
    const auto command = fifo.front();
    if (!command) {
      sched_yield();
      continue;
    }
    if (command->peer >= producers || !is_numbered(*command, command->peer, next[command->peer])) break;
    ++next[command->peer];
    ++taken;
    fifo.pop();
  }
  for (const uint64_t count : next) CHECK(count == total / producers);
}

}  // namespace

TEST_CASE("a command FIFO keeps the order, says when it is full, and wraps", "[fifo]") {
  const uint32_t capacity = GENERATE(1u, 2u, 4u);
  auto fifo = make_fifo(capacity);
  uint64_t pushed = 0, popped = 0;
  for (int lap = 0; lap < 10; ++lap) {
    CHECK_FALSE(fifo->front());
    while (fifo->try_push(numbered(0, pushed))) ++pushed;
    CHECK(pushed - popped == capacity);
    CHECK(fifo->claimed() == pushed);
    while (const auto command = fifo->front()) {
      CHECK(is_numbered(*command, 0, popped));
      fifo->pop();
      ++popped;
    }
    CHECK(popped == pushed);
  }
}

TEST_CASE("the turn of a slot wraps around 32 bits", "[fifo]") {
  constexpr uint32_t kCapacity = 4;
  // Two laps before the turn is 0, the value of memory that was never written.
  const uint64_t first = ((uint64_t{1} << 32) - 3) * kCapacity;
  auto fifo = make_fifo(kCapacity, first);
  std::vector<uint32_t> turns;
  for (uint64_t n = 0; n < 5 * kCapacity; ++n) {
    CHECK_FALSE(fifo->front());
    REQUIRE(fifo->try_push(numbered(1, n)));
    const auto command = fifo->front();
    REQUIRE(command);
    CHECK(is_numbered(*command, 1, n));
    if (n % kCapacity == 0) turns.push_back(command->turn);
    fifo->pop();
  }
  CHECK(turns == std::vector<uint32_t>{0xfffffffe, 0xffffffff, 0, 1, 2});
}

TEST_CASE("a claimed slot holds back those behind it", "[fifo]") {
  auto fifo = make_fifo(2);
  const uint64_t first = fifo->claim();
  const uint64_t second = fifo->claim();
  const uint64_t third = fifo->claim();
  CHECK_FALSE(fifo->try_push(numbered(0, 9)));
  CHECK(fifo->try_publish(second, numbered(0, 1)));
  CHECK_FALSE(fifo->front());
  CHECK_FALSE(fifo->try_publish(third, numbered(0, 2)));
  CHECK(fifo->try_publish(first, numbered(0, 0)));
  for (uint64_t n = 0; n < 2; ++n) {
    REQUIRE(fifo->front());
    CHECK(is_numbered(*fifo->front(), 0, n));
    fifo->pop();
  }
  CHECK(fifo->try_publish(third, numbered(0, 2)));
  REQUIRE(fifo->front());
  CHECK(is_numbered(*fifo->front(), 0, 2));
}

TEST_CASE("many producers, those that try and those that claim", "[fifo]") {
  const uint32_t capacity = GENERATE(1u, 4u, 256u);
  constexpr size_t kProducers = 4;
  // Each command of the smallest FIFO costs a change of threads.
  const uint64_t each = capacity == 1 ? 300 : 5000;
  auto fifo = make_fifo(capacity);
  std::vector<std::thread> producers;
  for (size_t p = 0; p < kProducers; ++p) {
    producers.emplace_back([&fifo = *fifo, p, each] {
      for (uint64_t n = 0; n < each; ++n) {
        if (p % 2 == 0) {
          while (!fifo.try_push(numbered(p, n))) sched_yield();
        } else {
          const uint64_t index = fifo.claim();
          while (!fifo.try_publish(index, numbered(p, n))) sched_yield();
        }
      }
    });
  }
  take_in_order(*fifo, kProducers, kProducers * each);
  for (std::thread& producer : producers) producer.join();
  CHECK(fifo->claimed() == kProducers * each);
  CHECK_FALSE(fifo->front());
}

TEST_CASE("a producer that keeps the head elsewhere finds its slots by the layout", "[fifo]") {
  constexpr uint32_t kCapacity = 8;
  auto fifo = make_fifo(kCapacity);
  std::byte* const pages = fifo->pages()->data();
  for (uint64_t index = 0; index < 5 * kCapacity; ++index) {
    CHECK_FALSE(fifo->front());
    uint64_t tail = 0;
    std::memcpy(&tail, pages + FifoLayout::kTail, sizeof tail);
    CHECK(tail == index);
    Command command = numbered(3, index);
    command.turn = turn_of(index, kCapacity);
    std::memcpy(static_cast<void*>(pages + FifoLayout::kSlots + index % kCapacity * sizeof(Command)), &command,
                sizeof command);
    REQUIRE(fifo->front());
    CHECK(is_numbered(*fifo->front(), 3, index));
    fifo->pop();
  }
  CHECK(fifo->claimed() == 0);
}

TEST_CASE("a command FIFO lies in whole pages and refuses odd capacities", "[fifo]") {
  auto fifo = make_fifo(256);
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  CHECK(reinterpret_cast<uintptr_t>(fifo->pages()->data()) % page == 0);
  CHECK(fifo->pages()->bytes() % page == 0);
  CHECK(fifo->pages()->bytes() >= FifoLayout::kSlots + 256 * sizeof(Command));
  CHECK_FALSE(CommandFifo::create(0).ok());
  CHECK_FALSE(CommandFifo::create(3).ok());
}

}  // namespace mk
