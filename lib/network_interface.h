// SPDX-License-Identifier: MIT
// Which of this machine's addresses the bootstrap uses.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "socket.h"

namespace mk {

struct NetworkInterface {
  std::string name;
  SocketAddress address;  // port 0
  int prefix_bits = 0;    // of its subnet
  bool loopback = false;
};

// Interfaces that are up, one entry an address; IPv6 link-local addresses, which other hosts cannot name, are
// left out.
Result<std::vector<NetworkInterface>> list_network_interfaces();

// Applies `selection` (the value of MK_SOCKET_IFNAME: comma-separated prefixes of names; ^ in front excludes
// them, = in front asks for exact names) and takes the best of what is left: one whose subnet holds `target`,
// else neither loopback nor docker, else any; IPv4 before IPv6. With a target, only its family.
// MK_ERROR_NETWORK lists what there is.
Result<NetworkInterface> choose_network_interface(std::span<const NetworkInterface> interfaces,
                                                  const std::string& selection,
                                                  const std::optional<SocketAddress>& target);

}  // namespace mk
