// SPDX-License-Identifier: MIT
#include "transport/proxy.h"

#include <atomic>
#include <thread>

#include "../support/catch.h"
#include "lib/deadline.h"

namespace mk {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

class FakeHandler : public ProxyHandler {
 public:
  bool handle(const Command& command) override {
    ++offers;
    if (!open.load()) return false;
    last = command.bytes;
    ++handled;
    return true;
  }
  bool progress() override {
    ++polls;
    return false;
  }
  microseconds prepare_wait(std::vector<pollfd>&) override { return microseconds(wait_us.load()); }

  std::atomic<bool> open{true};
  std::atomic<int> offers{0}, handled{0}, polls{0};
  std::atomic<uint32_t> last{0};
  std::atomic<int64_t> wait_us{microseconds::max().count()};
};

struct Setup {
  explicit Setup(IdleStrategy idle) {
    auto made = CommandFifo::create(4);
    REQUIRE(made.ok());
    fifo = made.take();
    auto started = Proxy::start(*fifo, handler, abort, idle);
    REQUIRE(started.ok());
    proxy = started.take();
  }
  bool push(uint32_t bytes) { return fifo->try_push(Command{CommandKind::put, 0, 0, 0, 0, 0, bytes, 0}); }

  AbortToken abort;
  FakeHandler handler;
  std::unique_ptr<CommandFifo> fifo;
  std::unique_ptr<Proxy> proxy;
};

bool soon(const std::function<bool()>& condition) {
  const Deadline deadline = Deadline::after(std::chrono::seconds(10));
  while (!condition() && !deadline.passed()) std::this_thread::sleep_for(milliseconds(1));
  return condition();
}

constexpr IdleStrategy kDeepSleep{microseconds(0), std::chrono::hours(1)};

}  // namespace

TEST_CASE("the doorbell wakes a proxy that would sleep for an hour", "[proxy]") {
  Setup setup(kDeepSleep);
  for (int n = 1; n <= 200; ++n) {
    REQUIRE(setup.push(static_cast<uint32_t>(n)));
    setup.proxy->ring();
    REQUIRE(soon([&] { return setup.handler.handled.load() == n; }));
    CHECK(setup.handler.last.load() == static_cast<uint32_t>(n));
  }
  CHECK(setup.handler.polls.load() < 2000);
}

TEST_CASE("producers that cannot ring are seen within the bound of the sleep", "[proxy]") {
  Setup setup({microseconds(0), milliseconds(5)});
  for (int n = 1; n <= 20; ++n) {
    REQUIRE(setup.push(1));
    REQUIRE(soon([&] { return setup.handler.handled.load() == n; }));
  }
}

TEST_CASE("an idle proxy sleeps", "[proxy]") {
  Setup setup({microseconds(0), milliseconds(50)});
  std::this_thread::sleep_for(milliseconds(300));
  CHECK(setup.handler.polls.load() < 50);
}

TEST_CASE("a busy proxy keeps looking for a while", "[proxy]") {
  Setup setup({milliseconds(200), std::chrono::hours(1)});
  REQUIRE(setup.push(1));
  setup.proxy->ring();
  REQUIRE(soon([&] { return setup.handler.handled.load() == 1; }));
  // Not rung: only polling finds it.
  REQUIRE(setup.push(2));
  CHECK(soon([&] { return setup.handler.handled.load() == 2; }));
}

TEST_CASE("a command without credit is offered again and holds back those behind it", "[proxy]") {
  Setup setup(kDeepSleep);
  setup.handler.open = false;
  setup.handler.wait_us = 2000;
  for (uint32_t n = 1; n <= 4; ++n) REQUIRE(setup.push(n));
  setup.proxy->ring();
  REQUIRE(soon([&] { return setup.handler.offers.load() >= 3; }));
  std::this_thread::sleep_for(milliseconds(100));
  // Blocked, it sleeps between the offers, and still looks for completions.
  CHECK(setup.handler.offers.load() < 200);
  CHECK(setup.handler.polls.load() >= 3);
  CHECK(setup.handler.handled.load() == 0);
  CHECK_FALSE(setup.push(5));
  setup.handler.open = true;
  CHECK(soon([&] { return setup.handler.handled.load() == 4; }));
  CHECK(setup.handler.last.load() == 4);
}

TEST_CASE("after an abort nothing is handled", "[proxy]") {
  Setup setup(kDeepSleep);
  REQUIRE(soon([&] { return setup.handler.polls.load() > 0; }));
  setup.abort.raise(Status(MK_ERROR_ABORTED, "enough"));
  std::this_thread::sleep_for(milliseconds(20));
  const int polls = setup.handler.polls.load();
  REQUIRE(setup.push(1));
  setup.proxy->ring();
  std::this_thread::sleep_for(milliseconds(50));
  CHECK(setup.handler.handled.load() == 0);
  CHECK(setup.handler.polls.load() == polls);
}

TEST_CASE("a proxy ends although commands wait", "[proxy]") {
  Setup setup(kDeepSleep);
  setup.handler.open = false;
  REQUIRE(setup.push(1));
  setup.proxy->ring();
  REQUIRE(soon([&] { return setup.handler.offers.load() > 0; }));
  const Deadline deadline = Deadline::after(std::chrono::seconds(5));
  setup.proxy.reset();
  CHECK_FALSE(deadline.passed());
}

}  // namespace mk
