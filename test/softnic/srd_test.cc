// SPDX-License-Identifier: MIT
// SRD over softnic: what EFA demands of its users, driven through <infiniband/efadv.h>.
#include <arpa/inet.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <set>

#include "../support/catch.h"
#include "node.h"

namespace softnic_test {
namespace {

constexpr uint32_t kBadAddress = 7, kBadQp = 9, kUnresponsive = 13, kUnknownPeer = 14;

ibv_qp_init_attr_ex srd_attributes(const Node& node) {
  ibv_qp_init_attr_ex attributes{};
  attributes.send_cq = attributes.recv_cq = node.cq;
  attributes.cap = {16, 16, 1, 1, 0};
  attributes.pd = node.pd;
  attributes.qp_type = IBV_QPT_DRIVER;
  attributes.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
  attributes.send_ops_flags = IBV_QP_EX_WITH_RDMA_WRITE;
  return attributes;
}

}  // namespace

TEST_CASE("SRD writes arrive with their immediates and all complete") {
  const Environment environment{{"KIND", "efa"}};
  Pair pair;
  for (uint64_t number = 0; number < 64; ++number) {
    REQUIRE(pair.b.receive(number) == 0);
    std::memset(pair.a.memory.data() + number * 100, static_cast<int>(number + 1), 100);
    REQUIRE(pair.a.write(pair.to_b, number * 100, 100, number, htonl(static_cast<uint32_t>(number))) == 0);
  }
  std::set<uint64_t> sent, seen;
  for (int count = 0; count < 64; ++count) {
    const ibv_wc arrival = pair.b.wait();
    REQUIRE(arrival.status == IBV_WC_SUCCESS);
    CHECK(arrival.opcode == IBV_WC_RECV_RDMA_WITH_IMM);
    seen.insert(ntohl(arrival.imm_data));
    const ibv_wc completion = pair.a.wait();
    REQUIRE(completion.status == IBV_WC_SUCCESS);
    sent.insert(completion.wr_id);
  }
  CHECK(seen.size() == 64);
  CHECK(sent.size() == 64);
  CHECK(std::memcmp(pair.a.memory.data(), pair.b.memory.data(), 6400) == 0);
}

TEST_CASE("SRD: the target must know the initiator") {
  const Environment environment{{"KIND", "efa"}};
  Node a, b;
  const Contact to_a = a.contact(), to_b = b.contact();
  REQUIRE(a.connect(to_b) == 0);
  REQUIRE(b.to_init() == 0);
  REQUIRE(b.to_rtr(to_a) == 0);
  std::fill(a.memory.begin(), a.memory.end(), std::byte{9});
  REQUIRE(a.write(to_b, 0, 8) == 0);
  ibv_wc completion = a.wait();
  CHECK(completion.status == IBV_WC_REM_OP_ERR);
  CHECK(completion.vendor_err == kUnknownPeer);
  CHECK(b.memory[0] == std::byte{0});
  // The error is that of one request: the QP goes on.
  b.handle_for(to_a);
  REQUIRE(a.write(to_b, 0, 8) == 0);
  completion = a.wait();
  CHECK(completion.status == IBV_WC_SUCCESS);
  CHECK(b.memory[0] == std::byte{9});
}

TEST_CASE("SRD: wrong keys, ranges, queue pairs and queue keys are errors of one request") {
  const Environment environment{{"KIND", "efa"}, {"TIMEOUT_DIVISOR", "320"}};
  Pair pair;
  struct Case {
    Contact contact;
    uint64_t offset;
    ibv_wc_status status;
    uint32_t vendor;
  };
  Contact bad_key = pair.to_b, bad_qp = pair.to_b, outside = pair.to_b;
  bad_key.rkey ^= 0x100;
  bad_qp.qp_number += 55;
  outside.address += pair.b.memory.size() - 4;
  pair.a.handles[bad_qp.qp_number] = pair.a.handle_for(pair.to_b);
  for (const Case& wrong : {Case{bad_key, 0, IBV_WC_REM_ACCESS_ERR, kBadAddress},
                            Case{bad_qp, 0, IBV_WC_REM_INV_RD_REQ_ERR, kBadQp},
                            Case{outside, 0, IBV_WC_REM_ACCESS_ERR, kBadAddress}}) {
    REQUIRE(pair.a.write(wrong.contact, wrong.offset, 8) == 0);
    const ibv_wc completion = pair.a.wait();
    CHECK(completion.status == wrong.status);
    CHECK(completion.vendor_err == wrong.vendor);
  }
  pair.a.handles.erase(bad_qp.qp_number);
  Contact elsewhere = pair.to_b;
  elsewhere.gid.raw[14] = 0x3f;
  elsewhere.qp_number = 9999;
  REQUIRE(pair.a.write(elsewhere, 0, 8) == 0);
  const ibv_wc lost = pair.a.wait();
  CHECK(lost.status == IBV_WC_RESP_TIMEOUT_ERR);
  CHECK(lost.vendor_err == kUnresponsive);
  ibv_qp_ex* const ex = ibv_qp_to_qp_ex(pair.a.qp);
  ibv_wr_start(ex);
  ibv_wr_rdma_write(ex, pair.to_b.rkey, pair.to_b.address);
  ibv_wr_set_ud_addr(ex, pair.a.handle_for(pair.to_b), pair.to_b.qp_number, kQkey + 1);
  ibv_wr_set_sge(ex, pair.a.mr->lkey, reinterpret_cast<uint64_t>(pair.a.memory.data()), 8);
  REQUIRE(ibv_wr_complete(ex) == 0);
  CHECK(pair.a.wait().status == IBV_WC_RESP_TIMEOUT_ERR);
  REQUIRE(pair.a.write(pair.to_b, 0, 8) == 0);
  CHECK(pair.a.wait().status == IBV_WC_SUCCESS);
}

TEST_CASE("SRD: misuse is refused") {
  const Environment environment{{"KIND", "efa"}};
  Pair pair;
  ibv_qp_ex* const ex = ibv_qp_to_qp_ex(pair.a.qp);
  ibv_ah* const handle = pair.a.handle_for(pair.to_b);
  const ibv_sge segments[2] = {{reinterpret_cast<uint64_t>(pair.a.memory.data()), 4, pair.a.mr->lkey},
                               {reinterpret_cast<uint64_t>(pair.a.memory.data()), 4, pair.a.mr->lkey}};
  SECTION("two segments") {
    ibv_wr_start(ex);
    ibv_wr_rdma_write(ex, pair.to_b.rkey, pair.to_b.address);
    ibv_wr_set_ud_addr(ex, handle, pair.to_b.qp_number, kQkey);
    ibv_wr_set_sge_list(ex, 2, segments);
    CHECK(ibv_wr_complete(ex) == EINVAL);
  }
  SECTION("an atomic") {
    ibv_wr_start(ex);
    ibv_wr_atomic_fetch_add(ex, pair.to_b.rkey, pair.to_b.address, 1);
    CHECK(ibv_wr_complete(ex) == EINVAL);
  }
  SECTION("inline data in an RDMA write") {
    uint32_t data = 1;
    ibv_wr_start(ex);
    ibv_wr_rdma_write(ex, pair.to_b.rkey, pair.to_b.address);
    ibv_wr_set_ud_addr(ex, handle, pair.to_b.qp_number, kQkey);
    ibv_wr_set_inline_data(ex, &data, sizeof(data));
    CHECK(ibv_wr_complete(ex) == EINVAL);
  }
  SECTION("ibv_post_send") {
    ibv_send_wr request{}, *bad = nullptr;
    request.opcode = IBV_WR_RDMA_WRITE;
    CHECK(ibv_post_send(pair.a.qp, &request, &bad) == EINVAL);
    CHECK(bad == &request);
  }
  SECTION("a batch is posted whole or not at all") {
    ibv_wr_start(ex);
    for (int count = 0; count < 257; ++count) {
      ibv_wr_rdma_write(ex, pair.to_b.rkey, pair.to_b.address);
      ibv_wr_set_ud_addr(ex, handle, pair.to_b.qp_number, kQkey);
      ibv_wr_set_sge(ex, pair.a.mr->lkey, segments[0].addr, 4);
    }
    CHECK(ibv_wr_complete(ex) == ENOMEM);
  }
  REQUIRE(pair.a.write(pair.to_b, 0, 8) == 0);
  CHECK(pair.a.wait().status == IBV_WC_SUCCESS);
}

TEST_CASE("SRD: inline data in an RDMA write, where the driver can") {
  const Environment environment{{"KIND", "efa"}, {"EFA_INLINE_WRITE", "1"}};
  Node b;
  Node a;
  const Contact to_b = b.contact();
  efadv_qp_init_attr efa{};
  ibv_qp_init_attr_ex attributes = srd_attributes(a);
  attributes.cap.max_inline_data = 32;
  a.destroy_qp();
  a.qp = efadv_create_qp_ex(a.context, &attributes, &efa, sizeof(efa));
  REQUIRE(a.qp != nullptr);
  REQUIRE(a.connect(to_b) == 0);
  REQUIRE(b.connect(a.contact()) == 0);
  ibv_qp_ex* const ex = ibv_qp_to_qp_ex(a.qp);
  for (const size_t bytes : {size_t{6}, size_t{33}}) {
    char data[33] = "inline";
    ibv_wr_start(ex);
    ibv_wr_rdma_write(ex, to_b.rkey, to_b.address);
    ibv_wr_set_ud_addr(ex, a.handle_for(to_b), to_b.qp_number, kQkey);
    ibv_wr_set_inline_data(ex, data, bytes);
    REQUIRE(ibv_wr_complete(ex) == (bytes <= 32 ? 0 : EINVAL));
  }
  CHECK(a.wait().status == IBV_WC_SUCCESS);
  CHECK(std::memcmp(b.memory.data(), "inline", 6) == 0);
}

TEST_CASE("SRD: queue pairs come from efadv_create_qp_ex alone") {
  const Environment environment{{"KIND", "efa"}};
  Node node;
  ibv_qp_init_attr plain{};
  plain.send_cq = plain.recv_cq = node.cq;
  plain.cap = {16, 16, 1, 1, 0};
  plain.qp_type = IBV_QPT_RC;
  CHECK(ibv_create_qp(node.pd, &plain) == nullptr);
  CHECK(errno == EOPNOTSUPP);

  efadv_qp_init_attr efa{};
  ibv_qp_init_attr_ex attributes = srd_attributes(node);
  attributes.cap.max_send_sge = 2;
  CHECK(efadv_create_qp_ex(node.context, &attributes, &efa, sizeof(efa)) == nullptr);
  attributes = srd_attributes(node);
  attributes.send_ops_flags |= IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD;
  CHECK(efadv_create_qp_ex(node.context, &attributes, &efa, sizeof(efa)) == nullptr);
  attributes = srd_attributes(node);
  ibv_qp* const qp = efadv_create_qp_ex(node.context, &attributes, &efa, sizeof(efa));
  REQUIRE(qp != nullptr);
  CHECK(ibv_destroy_qp(qp) == 0);
}

TEST_CASE("the EFA device tells its limits, another one has none") {
  efadv_device_attr attributes{};
  {
    const Environment environment{{"KIND", "efa"}};
    Node node;
    REQUIRE(efadv_query_device(node.context, &attributes, sizeof(attributes)) == 0);
    CHECK(attributes.max_sq_sge == 1);
    CHECK(attributes.max_rdma_size == 1u << 30);
    CHECK((attributes.device_caps & 1u << 3) != 0);
    ibv_port_attr port{};
    REQUIRE(ibv_query_port(node.context, 1, &port) == 0);
    CHECK(port.link_layer == IBV_LINK_LAYER_UNSPECIFIED);
    Node peer;
    efadv_ah_attr handle{};
    REQUIRE(efadv_query_ah(node.handle_for(peer.contact()), &handle, sizeof(handle)) == 0);
  }
  const Environment environment{};
  Node node;
  CHECK(efadv_query_device(node.context, &attributes, sizeof(attributes)) == EOPNOTSUPP);
}

TEST_CASE("SRD: a receiver that is not ready") {
  const Environment environment{{"KIND", "efa"}};
  NodeOptions options;
  SECTION("is waited for") {
    Pair pair(options);
    REQUIRE(pair.a.write(pair.to_b, 0, 8, 0, 5) == 0);
    CHECK_FALSE(pair.a.sleep(0));
    REQUIRE(pair.b.receive() == 0);
    CHECK(pair.b.wait().imm_data == 5);
    CHECK(pair.a.wait().status == IBV_WC_SUCCESS);
  }
  SECTION("is given up") {
    options.rnr_retry = 3;
    Pair pair(options);
    REQUIRE(pair.a.write(pair.to_b, 0, 8, 0, 5) == 0);
    CHECK(pair.a.wait().status == IBV_WC_RNR_RETRY_EXC_ERR);
    REQUIRE(pair.a.write(pair.to_b, 0, 8) == 0);
    CHECK(pair.a.wait().status == IBV_WC_SUCCESS);
  }
}

}  // namespace softnic_test
