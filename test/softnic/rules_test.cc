// SPDX-License-Identifier: MIT
// The rules of RC: states, keys, ranges, queue limits, retries, errors and events.
#include <arpa/inet.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>

#include "../support/catch.h"
#include "node.h"
#include "softnic.h"

namespace softnic_test {
namespace {

NodeOptions with_depth(uint32_t depth) {
  NodeOptions options;
  options.depth = depth;
  return options;
}

// A retry time-out of a few milliseconds in all.
NodeOptions impatient() {
  NodeOptions options;
  options.timeout = 10;
  options.retry_count = 1;
  return options;
}

ibv_qp_state state_of(Node& node) {
  ibv_qp_attr attributes{};
  ibv_qp_init_attr init{};
  REQUIRE(ibv_query_qp(node.qp, &attributes, IBV_QP_STATE, &init) == 0);
  return attributes.qp_state;
}

int go_to(Node& node, ibv_qp_state state) {
  ibv_qp_attr attributes{};
  attributes.qp_state = state;
  return ibv_modify_qp(node.qp, &attributes, IBV_QP_STATE);
}

}  // namespace

TEST_CASE("a queue pair goes through its states and in no other order") {
  const Environment environment{};
  Node a, b;
  const Contact to_b = b.contact();
  CHECK(a.receive() == EINVAL);
  CHECK(a.to_rts() == EINVAL);
  CHECK(a.to_rtr(to_b) == EINVAL);
  REQUIRE(a.to_init() == 0);
  CHECK(state_of(a) == IBV_QPS_INIT);
  CHECK(a.receive() == 0);
  CHECK(a.write(to_b, 0, 8) == EINVAL);
  CHECK(a.to_rts() == EINVAL);
  REQUIRE(a.to_rtr(to_b) == 0);
  CHECK(a.write(to_b, 0, 8) == EINVAL);
  CHECK(a.to_init() == EINVAL);
  REQUIRE(a.to_rts() == 0);
  CHECK(state_of(a) == IBV_QPS_RTS);
  REQUIRE(go_to(a, IBV_QPS_ERR) == 0);
  CHECK(a.wait().status == IBV_WC_WR_FLUSH_ERR);
  CHECK(a.to_rts() == EINVAL);
  REQUIRE(go_to(a, IBV_QPS_RESET) == 0);
  CHECK(a.receive() == EINVAL);
}

TEST_CASE("a transition wants its attributes, and none that are not its own") {
  const Environment environment{};
  Node node;
  const Contact peer = node.contact();
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_INIT;
  attributes.port_num = 1;
  const int init = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
  CHECK(ibv_modify_qp(node.qp, &attributes, init & ~IBV_QP_ACCESS_FLAGS) == EINVAL);
  CHECK(ibv_modify_qp(node.qp, &attributes, init | IBV_QP_TIMEOUT) == EINVAL);
  attributes.port_num = 9;
  CHECK(ibv_modify_qp(node.qp, &attributes, init) == EINVAL);
  attributes.port_num = 1;
  attributes.pkey_index = 1;
  CHECK(ibv_modify_qp(node.qp, &attributes, init) == EINVAL);
  REQUIRE(node.to_init() == 0);

  attributes = {};
  attributes.qp_state = IBV_QPS_RTR;
  attributes.path_mtu = IBV_MTU_1024;
  attributes.ah_attr.port_num = 1;
  attributes.ah_attr.dlid = peer.lid;
  const int rtr = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                  IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
  CHECK(ibv_modify_qp(node.qp, &attributes, rtr & ~IBV_QP_RQ_PSN) == EINVAL);
  attributes.path_mtu = static_cast<ibv_mtu>(0);
  CHECK(ibv_modify_qp(node.qp, &attributes, rtr) == EINVAL);
  attributes.path_mtu = IBV_MTU_1024;
  attributes.ah_attr.dlid = 0;
  CHECK(ibv_modify_qp(node.qp, &attributes, rtr) == EINVAL);
  attributes.ah_attr.dlid = peer.lid;
  CHECK(ibv_modify_qp(node.qp, &attributes, rtr) == 0);
}

TEST_CASE("RoCE has no route without a GRH") {
  const Environment environment{{"KIND", "roce"}};
  Node node;
  Contact peer = node.contact();
  CHECK(peer.lid == 0);
  REQUIRE(node.to_init() == 0);
  peer.lid = 1;  // what makes Node leave the GRH out
  CHECK(node.to_rtr(peer) == EINVAL);
  CHECK(node.to_rtr(node.contact()) == 0);
}

TEST_CASE("the target checks key, range, protection domain and access") {
  const Environment environment{};
  NodeOptions options;
  Contact wrong;
  ibv_wc_status expected = IBV_WC_REM_ACCESS_ERR;
  const auto try_write = [&](Pair& pair) {
    std::memset(pair.a.memory.data(), 0xee, 64);
    REQUIRE(pair.a.write(wrong, 0, 64) == 0);
    REQUIRE(pair.a.write(pair.to_b, 0, 64, 2) == 0);
    CHECK(pair.a.wait().status == expected);
    // Nothing comes after an error.
    CHECK(pair.a.wait().status == IBV_WC_WR_FLUSH_ERR);
    CHECK(state_of(pair.a) == IBV_QPS_ERR);
    CHECK(pair.b.memory[0] == std::byte{0});
    const std::optional<ibv_async_event> event = pair.b.event(5000);
    REQUIRE(event.has_value());
    CHECK(event->event_type == IBV_EVENT_QP_ACCESS_ERR);
    CHECK(event->element.qp == pair.b.qp);
    CHECK(state_of(pair.b) == IBV_QPS_ERR);
  };
  SECTION("key") {
    Pair pair(options);
    wrong = pair.to_b;
    wrong.rkey ^= 1;
    try_write(pair);
  }
  SECTION("range, behind") {
    Pair pair(options);
    wrong = pair.to_b;
    wrong.address += pair.b.memory.size() - 63;
    try_write(pair);
  }
  SECTION("range, before") {
    Pair pair(options);
    wrong = pair.to_b;
    wrong.address -= 1;
    try_write(pair);
  }
  SECTION("range, wrapping") {
    Pair pair(options);
    wrong = pair.to_b;
    wrong.address = UINT64_MAX - 7;
    try_write(pair);
  }
  SECTION("access") {
    options.access = IBV_ACCESS_LOCAL_WRITE;
    Pair pair(options);
    wrong = pair.to_b;
    try_write(pair);
  }
  SECTION("protection domain") {
    Pair pair(options);
    ibv_pd* const other = ibv_alloc_pd(pair.b.context);
    ibv_mr* const region = ibv_reg_mr(other, pair.b.memory.data(), 4096, pair.b.options.access);
    REQUIRE(region != nullptr);
    wrong = pair.to_b;
    wrong.rkey = region->rkey;
    try_write(pair);
    CHECK(ibv_dealloc_pd(other) == EBUSY);
    CHECK(ibv_dereg_mr(region) == 0);
    CHECK(ibv_dealloc_pd(other) == 0);
  }
  SECTION("a region that is gone") {
    Pair pair(options);
    wrong = pair.to_b;
    ibv_mr* const region = std::exchange(pair.b.mr, nullptr);
    CHECK(ibv_dereg_mr(region) == 0);
    try_write(pair);
  }
}

TEST_CASE("the initiator checks its own keys") {
  const Environment environment{};
  Pair pair;
  ibv_sge segment{reinterpret_cast<uint64_t>(pair.a.memory.data()), 64, pair.a.mr->lkey ^ 1};
  SECTION("key") {}
  SECTION("range") { segment = {segment.addr + pair.a.memory.size() - 63, 64, pair.a.mr->lkey}; }
  ibv_send_wr request{}, *bad = nullptr;
  request.sg_list = &segment;
  request.num_sge = 1;
  request.opcode = IBV_WR_RDMA_WRITE;
  request.wr.rdma = {pair.to_b.address, pair.to_b.rkey};
  REQUIRE(ibv_post_send(pair.a.qp, &request, &bad) == 0);
  // An error completes although no completion was asked for.
  CHECK(pair.a.wait().status == IBV_WC_LOC_PROT_ERR);
  CHECK(state_of(pair.a) == IBV_QPS_ERR);
}

TEST_CASE("a receiver without a receive request") {
  const Environment environment{};
  NodeOptions options;
  SECTION("is asked again, as long as it takes, and nothing overtakes") {
    Pair pair(options);
    std::memset(pair.a.memory.data(), 5, 64);
    REQUIRE(pair.a.write(pair.to_b, 0, 8, 1, 111) == 0);
    REQUIRE(pair.a.write(pair.to_b, 32, 8, 2, 222) == 0);
    std::optional<ibv_wc> early;
    for (int count = 0; count < 20 && !early; ++count) {
      early = pair.a.poll();
      CHECK_FALSE(pair.a.sleep(1));
    }
    CHECK_FALSE(early.has_value());
    CHECK(pair.b.memory[32] == std::byte{0});
    REQUIRE(pair.b.receive() == 0);
    REQUIRE(pair.b.receive() == 0);
    CHECK(pair.b.wait().imm_data == 111);
    CHECK(pair.b.wait().imm_data == 222);
    CHECK(pair.a.wait().wr_id == 1);
    CHECK(pair.a.wait().wr_id == 2);
  }
  SECTION("is given up after rnr_retry tries") {
    options.rnr_retry = 2;
    Pair pair(options);
    REQUIRE(pair.a.write(pair.to_b, 0, 8, 1, 111) == 0);
    CHECK(pair.a.wait().status == IBV_WC_RNR_RETRY_EXC_ERR);
  }
}

TEST_CASE("a send queue is full until completions are polled") {
  const Environment environment{};
  Pair pair(with_depth(8));
  for (uint64_t number = 0; number < 8; ++number) {
    REQUIRE(pair.a.write(pair.to_b, 0, 8, number, std::nullopt, number % 4 == 3) == 0);
  }
  CHECK(pair.a.write(pair.to_b, 0, 8) == ENOMEM);
  CHECK(pair.a.wait().wr_id == 3);
  for (uint64_t number = 0; number < 4; ++number) REQUIRE(pair.a.write(pair.to_b, 0, 8, 8 + number) == 0);
  CHECK(pair.a.write(pair.to_b, 0, 8) == ENOMEM);
  CHECK(pair.a.wait().wr_id == 7);
  for (uint64_t number = 8; number < 12; ++number) CHECK(pair.a.wait().wr_id == number);
}

TEST_CASE("a receive queue is full until completions are polled") {
  const Environment environment{};
  Pair pair(with_depth(4));
  for (int count = 0; count < 4; ++count) REQUIRE(pair.b.receive() == 0);
  CHECK(pair.b.receive() == ENOMEM);
  REQUIRE(pair.a.write(pair.to_b, 0, 8, 1, 1) == 0);
  CHECK(pair.b.wait().status == IBV_WC_SUCCESS);
  CHECK(pair.b.receive() == 0);
  CHECK(pair.b.receive() == ENOMEM);
}

TEST_CASE("inline data may be overwritten at once, and has a limit") {
  const Environment environment{};
  Pair pair;
  char data[65] = "inline";
  ibv_sge segment{reinterpret_cast<uint64_t>(data), 6, 0};
  ibv_send_wr request{}, *bad = nullptr;
  request.sg_list = &segment;
  request.num_sge = 1;
  request.opcode = IBV_WR_RDMA_WRITE;
  request.send_flags = IBV_SEND_INLINE | IBV_SEND_SIGNALED;
  request.wr.rdma = {pair.to_b.address, pair.to_b.rkey};
  REQUIRE(ibv_post_send(pair.a.qp, &request, &bad) == 0);
  std::memset(data, 'x', sizeof(data));
  CHECK(pair.a.wait().status == IBV_WC_SUCCESS);
  CHECK(std::memcmp(pair.b.memory.data(), "inline", 6) == 0);
  segment.length = 65;
  CHECK(ibv_post_send(pair.a.qp, &request, &bad) == EINVAL);
  CHECK(bad == &request);
}

TEST_CASE("a completion queue that overruns is in error, and so are its queue pairs") {
  const Environment environment{};
  NodeOptions options;
  options.completions = 4;
  Pair pair(options);
  for (uint64_t number = 0; number < 5; ++number) REQUIRE(pair.a.write(pair.to_b, 0, 8, number) == 0);
  const std::optional<ibv_async_event> event = pair.a.event(5000);
  REQUIRE(event.has_value());
  CHECK(event->event_type == IBV_EVENT_CQ_ERR);
  CHECK(event->element.cq == pair.a.cq);
  for (uint64_t number = 0; number < 4; ++number) CHECK(pair.a.wait().wr_id == number);
  CHECK_FALSE(pair.a.poll().has_value());
  CHECK(state_of(pair.a) == IBV_QPS_ERR);
}

TEST_CASE("a queue pair in error flushes what it has and what it gets") {
  const Environment environment{};
  Pair pair;
  REQUIRE(pair.b.receive(1) == 0);
  REQUIRE(pair.b.receive(2) == 0);
  REQUIRE(go_to(pair.b, IBV_QPS_ERR) == 0);
  for (uint64_t number = 1; number <= 2; ++number) {
    const ibv_wc completion = pair.b.wait();
    CHECK(completion.status == IBV_WC_WR_FLUSH_ERR);
    CHECK(completion.wr_id == number);
  }
  REQUIRE(pair.b.receive(3) == 0);
  CHECK(pair.b.wait().wr_id == 3);
  REQUIRE(pair.b.write(pair.to_a, 0, 8, 4, std::nullopt, false) == 0);
  const ibv_wc completion = pair.b.wait();
  CHECK(completion.wr_id == 4);
  CHECK(completion.status == IBV_WC_WR_FLUSH_ERR);
}

TEST_CASE("a queue pair can be reset and connected again") {
  const Environment environment{};
  Pair pair;
  REQUIRE(pair.a.write(pair.to_b, 0, 8) == 0);
  CHECK(pair.a.wait().status == IBV_WC_SUCCESS);
  REQUIRE(pair.b.receive(1) == 0);
  REQUIRE(go_to(pair.a, IBV_QPS_RESET) == 0);
  REQUIRE(go_to(pair.b, IBV_QPS_RESET) == 0);
  CHECK_FALSE(pair.b.poll().has_value());
  REQUIRE(pair.a.connect(pair.to_b) == 0);
  REQUIRE(pair.b.connect(pair.to_a) == 0);
  REQUIRE(pair.b.receive(2) == 0);
  REQUIRE(pair.a.write(pair.to_b, 0, 8, 3, 9) == 0);
  CHECK(pair.a.wait().status == IBV_WC_SUCCESS);
  CHECK(pair.b.wait().wr_id == 2);
}

TEST_CASE("a peer that does not answer is given up after the time-out, not before") {
  const Environment environment{{"TIMEOUT_DIVISOR", "1"}};
  NodeOptions options = impatient();
  std::optional<Pair> pair;
  // 4.096 us * 2^10 * 2 tries
  constexpr auto kPatience = std::chrono::microseconds(8388);
  SECTION("a queue pair that is not connected") {
    Node a(options), b(options);
    REQUIRE(a.connect(b.contact()) == 0);
    const auto begin = std::chrono::steady_clock::now();
    REQUIRE(a.write(b.contact(), 0, 8) == 0);
    CHECK(a.wait().status == IBV_WC_RETRY_EXC_ERR);
    CHECK(std::chrono::steady_clock::now() - begin >= kPatience);
  }
  SECTION("a wrong packet sequence number") {
    Node a(options);
    options.psn = 78;
    Node b(options);
    Contact to_a = a.contact(), to_b = b.contact();
    to_a.psn = 1;
    REQUIRE(a.connect(to_b) == 0);
    REQUIRE(b.connect(to_a) == 0);
    REQUIRE(a.write(to_b, 0, 8) == 0);
    CHECK(a.wait().status == IBV_WC_RETRY_EXC_ERR);
  }
  SECTION("nobody at that address") {
    Node a(options);
    Contact nobody = a.contact();
    nobody.lid = 0x3000;
    REQUIRE(a.connect(nobody) == 0);
    REQUIRE(a.write(nobody, 0, 8) == 0);
    CHECK(a.wait().status == IBV_WC_RETRY_EXC_ERR);
  }
  SECTION("a NIC that has fallen silent") {
    pair.emplace(options);
    REQUIRE(softnic_inject(pair->b.context, "vanish", nullptr, 0) == 0);
    REQUIRE(pair->a.write(pair->to_b, 0, 8) == 0);
    CHECK(pair->a.wait().status == IBV_WC_RETRY_EXC_ERR);
  }
  SECTION("a port that went down") {
    pair.emplace(options);
    REQUIRE(softnic_inject(pair->b.context, "port_down", nullptr, 1) == 0);
    const std::optional<ibv_async_event> event = pair->b.event(1000);
    REQUIRE(event.has_value());
    CHECK(event->event_type == IBV_EVENT_PORT_ERR);
    CHECK(event->element.port_num == 1);
    REQUIRE(pair->a.write(pair->to_b, 0, 8) == 0);
    CHECK(pair->a.wait().status == IBV_WC_RETRY_EXC_ERR);
  }
}

TEST_CASE("a port that is back in time costs nothing") {
  const Environment environment{{"TIMEOUT_DIVISOR", "1"}};
  Pair pair;
  REQUIRE(softnic_inject(pair.b.context, "port_down", nullptr, 1) == 0);
  REQUIRE(pair.a.write(pair.to_b, 0, 8, 1) == 0);
  REQUIRE(pair.a.write(pair.to_b, 0, 8, 2) == 0);
  CHECK_FALSE(pair.a.sleep(10));
  REQUIRE(softnic_inject(pair.b.context, "port_up", nullptr, 1) == 0);
  CHECK(pair.a.wait().wr_id == 1);
  CHECK(pair.a.wait().wr_id == 2);
}

TEST_CASE("a queue pair and a device can fail by themselves") {
  const Environment environment{};
  Pair pair;
  REQUIRE(pair.a.receive(5) == 0);
  REQUIRE(softnic_inject(pair.a.context, "qp_fatal", pair.a.qp, 0) == 0);
  std::optional<ibv_async_event> event = pair.a.event(1000);
  REQUIRE(event.has_value());
  CHECK(event->event_type == IBV_EVENT_QP_FATAL);
  CHECK(event->element.qp == pair.a.qp);
  CHECK(pair.a.wait().status == IBV_WC_WR_FLUSH_ERR);
  REQUIRE(softnic_inject(pair.a.context, "device_fatal", nullptr, 0) == 0);
  event = pair.a.event(1000);
  REQUIRE(event.has_value());
  CHECK(event->event_type == IBV_EVENT_DEVICE_FATAL);
  CHECK(softnic_inject(pair.a.context, "no such fault", nullptr, 0) == EINVAL);
}

TEST_CASE("once a queue pair is destroyed nobody reads memory for it, although its NIC took no answer") {
  for (const char* kind : {"ib", "efa"}) {
    INFO(kind);
    const Environment environment{{"KIND", kind}};
    NodeOptions options;
    options.bytes = 8 << 20;
    Pair pair(options);
    std::fill(pair.a.memory.begin(), pair.a.memory.end(), std::byte{1});
    for (uint64_t number = 0; number < 64; ++number)
      REQUIRE(pair.a.write(pair.to_b, 0, static_cast<uint32_t>(options.bytes), number) == 0);
    REQUIRE(pair.a.wait().status == IBV_WC_SUCCESS);
    REQUIRE(softnic_inject(pair.a.context, "vanish", nullptr, 0) == 0);
    // The next answers come and are not heard; most requests are still to be read.
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    pair.a.destroy_qp();
    std::fill(pair.a.memory.begin(), pair.a.memory.end(), std::byte{2});
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    pair.b.destroy_qp();
    CHECK(std::count(pair.b.memory.begin(), pair.b.memory.end(), std::byte{2}) == 0);
  }
}

TEST_CASE("a queue pair is destroyed only when its events are acknowledged") {
  const Environment environment{};
  Pair pair;
  REQUIRE(softnic_inject(pair.a.context, "qp_fatal", pair.a.qp, 0) == 0);
  ibv_async_event event{};
  REQUIRE(ibv_get_async_event(pair.a.context, &event) == 0);
  constexpr std::chrono::milliseconds kLater{50};
  const auto begin = std::chrono::steady_clock::now();
  std::thread other([&] {
    std::this_thread::sleep_for(kLater);
    ibv_ack_async_event(&event);
  });
  pair.a.destroy_qp();
  CHECK(std::chrono::steady_clock::now() - begin >= kLater);
  other.join();
}

TEST_CASE("a small read brings bytes back") {
  const Environment environment{};
  Pair pair;
  std::memcpy(pair.b.memory.data() + 16, "remote", 6);
  ibv_sge segment{reinterpret_cast<uint64_t>(pair.a.memory.data()), 6, pair.a.mr->lkey};
  ibv_send_wr request{}, *bad = nullptr;
  request.sg_list = &segment;
  request.num_sge = 1;
  request.opcode = IBV_WR_RDMA_READ;
  request.send_flags = IBV_SEND_SIGNALED;
  request.wr.rdma = {pair.to_b.address + 16, pair.to_b.rkey};
  REQUIRE(ibv_post_send(pair.a.qp, &request, &bad) == 0);
  const ibv_wc completion = pair.a.wait();
  CHECK(completion.status == IBV_WC_SUCCESS);
  CHECK(completion.opcode == IBV_WC_RDMA_READ);
  CHECK(std::memcmp(pair.a.memory.data(), "remote", 6) == 0);
}

TEST_CASE("several segments become one write") {
  const Environment environment{};
  Pair pair;
  std::memcpy(pair.a.memory.data(), "abcdef", 6);
  const uint64_t base = reinterpret_cast<uint64_t>(pair.a.memory.data());
  ibv_sge segments[3] = {
      {base + 4, 2, pair.a.mr->lkey}, {base, 1, pair.a.mr->lkey}, {base + 2, 1, pair.a.mr->lkey}};
  ibv_send_wr request{}, *bad = nullptr;
  request.sg_list = segments;
  request.num_sge = 3;
  request.opcode = IBV_WR_RDMA_WRITE;
  request.send_flags = IBV_SEND_SIGNALED;
  request.wr.rdma = {pair.to_b.address, pair.to_b.rkey};
  REQUIRE(ibv_post_send(pair.a.qp, &request, &bad) == 0);
  CHECK(pair.a.wait().status == IBV_WC_SUCCESS);
  CHECK(std::memcmp(pair.b.memory.data(), "efac", 4) == 0);
}

}  // namespace softnic_test
