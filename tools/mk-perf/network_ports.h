// SPDX-License-Identifier: MIT
// What the kernel says of this machine's RDMA ports, whether or not a transport can use them.
#pragma once

#include <string>
#include <vector>

namespace perf {

struct NetworkPort {
  std::string name;    // "mlx5_0 port 1"
  std::string state;   // "ACTIVE", "DOWN", ...
  std::string rate;    // "400 Gb/sec (4X NDR)"
  std::string layer;   // "InfiniBand" or "Ethernet"
  int gid_index = -1;  // of the best GID: RoCE v2 before others, one of an IPv4 address first
  std::string gid;
  std::string gid_type;

  std::string text() const;
  // "" or what is wrong with it and what to do.
  std::string problem() const;
};

std::vector<NetworkPort> list_network_ports(const std::string& folder = "/sys/class/infiniband");

}  // namespace perf
