// SPDX-License-Identifier: MIT
// What the devices say of themselves, and the variables that decide it.
#include <cerrno>
#include <cstring>

#include "../support/catch.h"
#include "node.h"

namespace softnic_test {
namespace {

int count_devices() {
  int count = -1;
  ibv_device** const devices = ibv_get_device_list(&count);
  if (devices == nullptr) return -1;
  ibv_free_device_list(devices);
  return count;
}

}  // namespace

TEST_CASE("devices are as many as asked for, each opened one has an address of its own") {
  const Environment environment{{"NICS", "3"}};
  CHECK(count_devices() == 3);
  NodeOptions second;
  second.device = 1;
  Node a, b, c(second);
  CHECK(std::strcmp(ibv_get_device_name(c.context->device), "softnic1") == 0);
  CHECK(a.contact().lid != b.contact().lid);
  CHECK(std::memcmp(a.contact().gid.raw, b.contact().gid.raw, 16) != 0);
  ibv_device_attr_ex attributes{};
  REQUIRE(ibv_query_device_ex(a.context, nullptr, &attributes) == 0);
  CHECK(attributes.orig_attr.phys_port_cnt == 1);
  CHECK(attributes.orig_attr.atomic_cap == IBV_ATOMIC_NONE);
}

TEST_CASE("a GID table tells types and families") {
  const Environment environment{{"KIND", "roce"}, {"PORTS", "2"}};
  Node node;
  ibv_port_attr port{};
  REQUIRE(ibv_query_port(node.context, 2, &port) == 0);
  CHECK(port.link_layer == IBV_LINK_LAYER_ETHERNET);
  CHECK(port.gid_tbl_len == 4);
  CHECK(ibv_query_port(node.context, 3, &port) == EINVAL);
  for (uint32_t index = 0; index < 4; ++index) {
    ibv_gid_entry entry{};
    REQUIRE(ibv_query_gid_ex(node.context, 1, index, &entry, 0) == 0);
    CHECK(entry.gid_type == (index % 2 == 0 ? IBV_GID_TYPE_ROCE_V1 : IBV_GID_TYPE_ROCE_V2));
    CHECK((entry.gid.raw[0] == 0) == (index >= 2));
    CHECK(entry.gid_index == index);
  }
  ibv_gid_entry entry{};
  CHECK(ibv_query_gid_ex(node.context, 1, 4, &entry, 0) == EINVAL);
  ibv_gid_entry table[8];
  CHECK(ibv_query_gid_table(node.context, table, 8, 0) == 8);
}

TEST_CASE("RoCE works over each GID when both ends choose the same type") {
  const Environment environment{{"KIND", "roce"}, {"TIMEOUT_DIVISOR", "10000"}};
  for (int index = 0; index < 4; ++index) {
    NodeOptions options;
    options.gid_index = index;
    Pair pair(options);
    REQUIRE(pair.a.write(pair.to_b, 0, 8) == 0);
    CHECK(pair.a.wait().status == IBV_WC_SUCCESS);
  }
  NodeOptions version1, version2;
  version2.gid_index = 1;
  Node a(version1), b(version2);
  REQUIRE(a.connect(b.contact()) == 0);
  REQUIRE(b.connect(a.contact()) == 0);
  REQUIRE(a.write(b.contact(), 0, 8) == 0);
  CHECK(a.wait().status == IBV_WC_RETRY_EXC_ERR);
}

TEST_CASE("ports that are down, GIDs that are wrong, paths that are blocked") {
  const Environment environment{
      {"NICS", "3"},     {"PORTS", "2"}, {"DOWN", "0:2,1"}, {"WRONG_GID", "2"}, {"TIMEOUT_DIVISOR", "10000"},
      {"BLOCKED", "0-2"}};
  NodeOptions options;
  Node a(options);
  options.device = 1;
  Node b(options);
  options.device = 2;
  Node c(options);
  ibv_port_attr port{};
  REQUIRE(ibv_query_port(a.context, 1, &port) == 0);
  CHECK(port.state == IBV_PORT_ACTIVE);
  REQUIRE(ibv_query_port(a.context, 2, &port) == 0);
  CHECK(port.state == IBV_PORT_DOWN);
  REQUIRE(ibv_query_port(b.context, 1, &port) == 0);
  CHECK(port.state == IBV_PORT_DOWN);

  REQUIRE(a.connect(b.contact()) == 0);
  REQUIRE(b.connect(a.contact()) == 0);
  REQUIRE(a.write(b.contact(), 0, 8) == 0);
  CHECK(a.wait().status == IBV_WC_RETRY_EXC_ERR);

  Node d(options), e(options);
  REQUIRE(d.connect(e.contact()) == 0);
  REQUIRE(e.connect(d.contact()) == 0);
  REQUIRE(d.write(e.contact(), 0, 8) == 0);
  CHECK(d.wait().status == IBV_WC_RETRY_EXC_ERR);
}

TEST_CASE("a blocked path loses what is sent") {
  const Environment environment{{"NICS", "2"}, {"TIMEOUT_DIVISOR", "10000"}, {"BLOCKED", "0-1"}};
  NodeOptions other;
  other.device = 1;
  Node a, b(other), c;
  REQUIRE(a.connect(b.contact()) == 0);
  REQUIRE(b.connect(a.contact()) == 0);
  REQUIRE(a.write(b.contact(), 0, 8) == 0);
  CHECK(a.wait().status == IBV_WC_RETRY_EXC_ERR);
}

TEST_CASE("variables that make no sense are refused") {
  for (const auto& [name, value] :
       {std::pair{"KIND", "token ring"}, std::pair{"NICS", "many"}, std::pair{"RATE_GBPS", "-4"},
        std::pair{"ADVERSITY", "rain=0.5"}, std::pair{"ADVERSITY", "error=0.5:77"}, std::pair{"BLOCKED", "0:1"},
        std::pair{"DOWN", "x"}}) {
    const Environment environment{{name, value}};
    errno = 0;
    CHECK(count_devices() == -1);
    CHECK(errno == EINVAL);
  }
}

TEST_CASE("memory registration has its rules") {
  const Environment environment{};
  Node node;
  const int local = IBV_ACCESS_LOCAL_WRITE, remote = IBV_ACCESS_REMOTE_WRITE;
  CHECK(ibv_reg_mr(node.pd, node.memory.data(), 64, remote) == nullptr);
  CHECK(errno == EINVAL);
  CHECK(ibv_reg_dmabuf_mr(node.pd, 0, 4096, 0, -1, local) == nullptr);
  CHECK(errno == EOPNOTSUPP);
  ibv_mr* const first = ibv_reg_mr(node.pd, node.memory.data(), 64, local);
  REQUIRE(first != nullptr);
  const uint32_t key = first->rkey;
  REQUIRE(ibv_dereg_mr(first) == 0);
  ibv_mr* const second = ibv_reg_mr(node.pd, node.memory.data(), 64, local);
  REQUIRE(second != nullptr);
  CHECK(second->rkey != key);
  CHECK(ibv_dereg_mr(second) == 0);
}

TEST_CASE("objects in use cannot be destroyed") {
  const Environment environment{};
  Node node;
  CHECK(ibv_destroy_cq(node.cq) == EBUSY);
  CHECK(ibv_destroy_comp_channel(node.channel) == EBUSY);
  CHECK(ibv_dealloc_pd(node.pd) == EBUSY);
}

}  // namespace softnic_test
