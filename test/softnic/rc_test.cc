// SPDX-License-Identifier: MIT
// RC over softnic: what the specification promises, driven through <infiniband/verbs.h>.
#include <arpa/inet.h>

#include <cerrno>
#include <cstring>
#include <thread>

#include "../support/catch.h"
#include "node.h"

namespace softnic_test {
namespace {

void fill(Node& node, uint64_t offset, size_t bytes, int seed) {
  for (size_t index = 0; index < bytes; ++index) {
    node.memory[offset + index] = static_cast<std::byte>((index * 31 + static_cast<size_t>(seed)) & 0xff);
  }
}

bool equal(const Node& a, const Node& b, uint64_t offset, size_t bytes) {
  return std::memcmp(a.memory.data() + offset, b.memory.data() + offset, bytes) == 0;
}

}  // namespace

TEST_CASE("a write arrives and completes") {
  const Environment environment{};
  Pair pair;
  fill(pair.a, 0, 5000, 1);
  REQUIRE(pair.a.write(pair.to_b, 0, 5000, 42) == 0);
  const ibv_wc completion = pair.a.wait();
  CHECK(completion.status == IBV_WC_SUCCESS);
  CHECK(completion.opcode == IBV_WC_RDMA_WRITE);
  CHECK(completion.wr_id == 42);
  CHECK(completion.qp_num == pair.a.qp->qp_num);
  CHECK(equal(pair.a, pair.b, 0, 5000));
  CHECK_FALSE(pair.b.poll().has_value());
}

TEST_CASE("an immediate comes after its bytes and takes a receive request") {
  const Environment environment{};
  Pair pair;
  REQUIRE(pair.b.receive(7) == 0);
  fill(pair.a, 100, 300, 2);
  REQUIRE(pair.a.write(pair.to_b, 100, 300, 1, htonl(kImmediate)) == 0);
  const ibv_wc arrival = pair.b.wait();
  CHECK(arrival.status == IBV_WC_SUCCESS);
  CHECK(arrival.opcode == IBV_WC_RECV_RDMA_WITH_IMM);
  CHECK(arrival.wr_id == 7);
  CHECK(arrival.byte_len == 300);
  CHECK(arrival.wc_flags == IBV_WC_WITH_IMM);
  CHECK(ntohl(arrival.imm_data) == kImmediate);
  CHECK(arrival.qp_num == pair.b.qp->qp_num);
  CHECK(equal(pair.a, pair.b, 100, 300));
  CHECK(pair.a.wait().status == IBV_WC_SUCCESS);
}

TEST_CASE("completions come in order and only those asked for") {
  const Environment environment{};
  Pair pair;
  for (uint64_t number = 0; number < 100; ++number) {
    fill(pair.a, number * 64, 64, static_cast<int>(number));
    REQUIRE(pair.a.write(pair.to_b, number * 64, 64, number, std::nullopt, number % 4 == 3) == 0);
  }
  for (uint64_t number = 3; number < 100; number += 4) {
    const ibv_wc completion = pair.a.wait();
    REQUIRE(completion.status == IBV_WC_SUCCESS);
    CHECK(completion.wr_id == number);
  }
  CHECK(equal(pair.a, pair.b, 0, 6400));
}

TEST_CASE("what a stranger sends does not stand in the way of the peer's") {
  const Environment environment{};
  Pair pair;
  // As one does whose peer had this NIC's number, and is no more: again and again, until it gives up.
  NodeOptions options;
  options.timeout = 18;
  Node stranger(options);
  REQUIRE(stranger.connect(pair.to_b) == 0);
  REQUIRE(stranger.write(pair.to_b, 0, 8, 1) == 0);
  std::this_thread::sleep_for(std::chrono::milliseconds(2));
  for (uint64_t number = 0; number < 20; ++number) {
    fill(pair.a, number * 64, 64, static_cast<int>(number));
    REQUIRE(pair.a.write(pair.to_b, number * 64, 64, number) == 0);
    const ibv_wc completion = pair.a.wait(10000);
    REQUIRE(completion.status == IBV_WC_SUCCESS);
    CHECK(completion.wr_id == number);
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  CHECK(equal(pair.a, pair.b, 0, 1280));
  CHECK_FALSE(stranger.poll().has_value());
}

TEST_CASE("a completion channel wakes a sleeper once for each request") {
  const Environment environment{};
  Pair pair;
  REQUIRE(ibv_req_notify_cq(pair.b.cq, 0) == 0);
  REQUIRE(pair.b.receive() == 0);
  REQUIRE(pair.b.receive() == 0);
  int posted = -1;  // Catch2 belongs to one thread
  std::thread sender([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    posted = pair.a.write(pair.to_b, 0, 8, 0, 1);
  });
  CHECK(pair.b.sleep(5000));
  sender.join();
  CHECK(posted == 0);
  CHECK(pair.b.wait().status == IBV_WC_SUCCESS);
  REQUIRE(pair.a.write(pair.to_b, 0, 8, 0, 1) == 0);
  CHECK(pair.b.wait().status == IBV_WC_SUCCESS);
  CHECK_FALSE(pair.b.sleep(20));
}

}  // namespace softnic_test
