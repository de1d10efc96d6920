// SPDX-License-Identifier: MIT
// RC and SRD between processes: payload fetched from another process, peers that exit or are killed.
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "../support/catch.h"
#include "child.h"
#include "node.h"

namespace softnic_test {
namespace {

constexpr size_t kBytes = 3 << 20;
constexpr uint32_t kSlot = kBytes / 8;

std::byte pattern(size_t index) { return static_cast<std::byte>((index * 131 + index / 4096) & 0xff); }

NodeOptions large() {
  NodeOptions options;
  options.bytes = kBytes;
  return options;
}

bool meet(Node& node, int socket, Contact& peer) {
  // Both are connected before either goes on: SRD does not wait for a peer that does not know it yet.
  char ready = 'r';
  return give(socket, node.contact()) && take(socket, peer) && node.connect(peer) == 0 && give(socket, ready) &&
         take(socket, ready);
}

// Writes everything with an immediate, then stays until told to go.
bool write_all(int socket) {
  Node node(large());
  Contact peer;
  for (size_t index = 0; index < kBytes; ++index) node.memory[index] = pattern(index);
  char go = 0;
  if (!meet(node, socket, peer) || !take(socket, go)) return false;
  if (node.write(peer, 0, kBytes, 5, 99) != 0) return false;
  const ibv_wc completion = node.wait();
  return completion.status == IBV_WC_SUCCESS && give(socket, go) && take(socket, go);
}

void receive_from_process() {
  Child child(write_all);
  Node node(large());
  Contact peer;
  REQUIRE(meet(node, child.socket(), peer));
  REQUIRE(node.receive(3) == 0);
  REQUIRE(give(child.socket(), 'g'));
  const ibv_wc arrival = node.wait();
  REQUIRE(arrival.status == IBV_WC_SUCCESS);
  CHECK(arrival.imm_data == 99);
  CHECK(arrival.byte_len == kBytes);
  size_t wrong = 0;
  for (size_t index = 0; index < kBytes; ++index) wrong += node.memory[index] != pattern(index) ? 1 : 0;
  CHECK(wrong == 0);
  char done = 0;
  REQUIRE(take(child.socket(), done));
  REQUIRE(give(child.socket(), 'x'));
  CHECK(child.wait() == 0);
}

}  // namespace

TEST_CASE("RC between processes") {
  const Environment environment{};
  receive_from_process();
}

TEST_CASE("SRD between processes") {
  const Environment environment{{"KIND", "efa"}};
  receive_from_process();
}

TEST_CASE("between processes, under adversity, paced") {
  for (const char* kind : {"ib", "roce", "efa"}) {
    const Environment environment{{"KIND", kind}, {"SEED", "11"}, {"RATE_GBPS", "100"}, {"LATENCY_US", "5"}};
    receive_from_process();
  }
}

TEST_CASE("a process that is killed is given up after the time-out") {
  for (const char* kind : {"ib", "efa"}) {
    const Environment environment{{"KIND", kind}, {"TIMEOUT_DIVISOR", "160"}};
    Child child([](int socket) {
      Node node(large());
      Contact peer;
      char never = 0;
      return meet(node, socket, peer) && take(socket, never);
    });
    Node node(large());
    Contact peer;
    REQUIRE(meet(node, child.socket(), peer));
    REQUIRE(node.write(peer, 0, 1 << 20, 1) == 0);
    REQUIRE(node.wait().status == IBV_WC_SUCCESS);
    child.kill_now();
    ibv_wc completion{};
    for (uint64_t number = 2; completion.status == IBV_WC_SUCCESS && number < 200; ++number) {
      REQUIRE(node.write(peer, 0, 1 << 20, number) == 0);
      completion = node.wait();
    }
    CHECK(completion.status == (node.is_efa() ? IBV_WC_RESP_TIMEOUT_ERR : IBV_WC_RETRY_EXC_ERR));
  }
}

TEST_CASE("a process that is stopped does not keep a queue pair from being destroyed") {
  const Environment environment{};
  Child child([](int socket) {
    Node node(large());
    Contact peer;
    char never = 0;
    return meet(node, socket, peer) && take(socket, never);
  });
  Node node(large());
  Contact peer;
  REQUIRE(meet(node, child.socket(), peer));
  REQUIRE(node.write(peer, 0, 8, 1) == 0);
  REQUIRE(node.wait().status == IBV_WC_SUCCESS);
  child.stop();
  REQUIRE(node.write(peer, 0, 8, 2) == 0);
  CHECK(node.wait(50).status != IBV_WC_SUCCESS);
  node.destroy_qp();
}

TEST_CASE("a sender that is killed in mid-flight delivers what it has sent whole or not at all") {
  for (int repetition = 0; repetition < 10; ++repetition) {
    const Environment environment{{"SEED", "13"}};
    Child child([](int socket) {
      Node node(large());
      Contact peer;
      std::memset(node.memory.data(), 7, kBytes);
      if (!meet(node, socket, peer)) return false;
      char go = 0;
      if (!take(socket, go)) return false;
      for (uint64_t number = 0; number < 8; ++number) {
        node.write(peer, number * kSlot, kSlot, number, static_cast<uint32_t>(number));
      }
      return give(socket, go) && take(socket, go);
    });
    Node node(large());
    Contact peer;
    REQUIRE(meet(node, child.socket(), peer));
    for (int count = 0; count < 8; ++count) REQUIRE(node.receive() == 0);
    REQUIRE(give(child.socket(), 'g'));
    char posted = 0;
    REQUIRE(take(child.socket(), posted));
    usleep(static_cast<useconds_t>(repetition * 200));
    child.kill_now();
    CHECK(child.wait() == -1);
    bool whole = true;
    for (ibv_wc arrival = node.wait(100); static_cast<int>(arrival.status) >= 0; arrival = node.wait(20)) {
      whole = whole && arrival.status == IBV_WC_SUCCESS;
      const std::byte* const slot = node.memory.data() + arrival.imm_data * kSlot;
      whole = whole && std::all_of(slot, slot + kSlot, [](std::byte byte) { return byte == std::byte{7}; });
    }
    CHECK(whole);
  }
}

}  // namespace softnic_test
