// SPDX-License-Identifier: MIT
#include "lib/network_interface.h"

#include "../support/catch.h"

using namespace mk;

namespace {

SocketAddress v4(uint8_t a, uint8_t b, uint8_t c, uint8_t d) {
  SocketAddress address;
  address.family = 4;
  address.bytes = {a, b, c, d};
  return address;
}

SocketAddress v6(uint8_t first, uint8_t last) {
  SocketAddress address;
  address.family = 6;
  address.bytes[0] = first;
  address.bytes[15] = last;
  return address;
}

const std::vector<NetworkInterface> kMachine = {
    {"lo", v4(127, 0, 0, 1), 8, true},     {"docker0", v4(172, 17, 0, 1), 16, false},
    {"eth0", v6(0xfd, 5), 64, false},      {"eth0", v4(10, 0, 0, 5), 24, false},
    {"eth10", v4(10, 0, 1, 5), 23, false}, {"ib0", v4(192, 168, 0, 5), 24, false},
};

std::string choose(const std::string& selection, std::optional<SocketAddress> target = {},
                   const std::vector<NetworkInterface>& machine = kMachine) {
  auto chosen = choose_network_interface(machine, selection, target);
  return chosen.ok() ? chosen->name + " " + chosen->address.text() : chosen.status().sentence();
}

}  // namespace

TEST_CASE("without a selection, neither loopback nor docker is taken if there is another one") {
  CHECK(choose("") == "eth0 10.0.0.5:0");
  CHECK(choose("", {}, {kMachine[0], kMachine[1]}) == "docker0 172.17.0.1:0");
  CHECK(choose("", {}, {kMachine[0]}) == "lo 127.0.0.1:0");
  CHECK(choose("", {}, {kMachine[2]}) == "eth0 [fd00::5]:0");
}

TEST_CASE("the subnet that holds the target comes first, and only its family") {
  CHECK(choose("", v4(192, 168, 0, 77)) == "ib0 192.168.0.5:0");
  CHECK(choose("", v4(10, 0, 0, 77)) == "eth0 10.0.0.5:0");
  // 23 bits: 10.0.0.0 to 10.0.1.255, and eth0 does not reach 10.0.1.x.
  CHECK(choose("", v4(10, 0, 1, 77)) == "eth10 10.0.1.5:0");
  CHECK(choose("", v4(127, 0, 0, 1)) == "lo 127.0.0.1:0");
  CHECK(choose("", v6(0xfd, 9)) == "eth0 [fd00::5]:0");
  CHECK(choose("^eth0", v6(0xfd, 9)).find("no usable network interface") == 0);
}

TEST_CASE("a selection names prefixes, = exact names, ^ excludes") {
  CHECK(choose("ib") == "ib0 192.168.0.5:0");
  CHECK(choose("eth1") == "eth10 10.0.1.5:0");
  CHECK(choose("=eth1").find("no usable network interface: MK_SOCKET_IFNAME is \"=eth1\"") == 0);
  CHECK(choose("=eth10,ib0") == "eth10 10.0.1.5:0");
  CHECK(choose("^eth") == "ib0 192.168.0.5:0");
  CHECK(choose("^eth,ib") == "docker0 172.17.0.1:0");
  CHECK(choose("^=eth0") == "eth10 10.0.1.5:0");
  CHECK(choose("eth", v4(10, 0, 1, 9)) == "eth10 10.0.1.5:0");
  CHECK(choose("nosuch").find("this machine has lo, docker0, eth0, eth0, eth10, ib0") != std::string::npos);
}

TEST_CASE("this machine has an interface") {
  const auto interfaces = list_network_interfaces();
  REQUIRE(interfaces.ok());
  CHECK(choose_network_interface(interfaces.value(), "", std::nullopt).ok());
}
