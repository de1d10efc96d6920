// SPDX-License-Identifier: MIT
// Which ports of which devices a rank uses, and under which GID: rules without hardware.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "../../lib/status.h"

namespace mk::verbs {

// MK_IB_HCA: comma-separated prefixes of device names, each with or without ":port". "^" in front of the list
// excludes them, "=" asks for exact names; both together are "^=".
class DeviceFilter {
 public:
  static Result<DeviceFilter> parse(std::string_view text);
  bool accepts(std::string_view device, int port) const;

 private:
  struct Entry {
    std::string name;
    int port;  // 0: any
  };
  std::vector<Entry> entries_;
  bool exclude_ = false;
  bool exact_ = false;
};

// Steps from one PCI device to another through the tree that /sys/devices shows: fewer is nearer. Both are real
// paths, such as /sys/devices/pci0000:00/0000:00:01.0/0000:01:00.0.
int path_distance(std::string_view a, std::string_view b);

// Indices of the ports that this rank uses, at most `most`. With distances (one a port): all that are nearest.
// Without: the ports are dealt to the ranks of the node in turn; with fewer ports than ranks they are shared.
std::vector<size_t> choose_ports(size_t num_ports, std::span<const int> distances, int local_rank,
                                 int local_nranks, size_t most);

enum class GidKind : uint8_t { infiniband = 0, roce_v1 = 1, roce_v2 = 2, efa = 3 };
const char* name_of(GidKind kind);

using Gid = std::array<uint8_t, 16>;

struct GidEntry {
  int index = 0;
  GidKind kind = GidKind::infiniband;
  Gid gid{};
};

bool is_ipv4_mapped(const Gid& gid);
bool is_link_local(const Gid& gid);
// "fe80::1", or "10.0.0.1" for a mapped IPv4 address.
std::string text_of(const Gid& gid);

// The entry to use on an Ethernet port: RoCE v2 before v1, IPv4 before IPv6 before link-local, then the lowest
// index. Entries of zeros do not count. None: the port has no address.
std::optional<GidEntry> choose_gid(std::span<const GidEntry> entries);

}  // namespace mk::verbs
