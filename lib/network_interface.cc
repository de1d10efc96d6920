// SPDX-License-Identifier: MIT
#include "network_interface.h"

#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <memory>
#include <string_view>

namespace mk {
namespace {

size_t address_bytes(const SocketAddress& address) { return address.family == 4 ? 4 : 16; }

SocketAddress read_address(const sockaddr* raw) {
  SocketAddress address;
  if (raw->sa_family == AF_INET) {
    sockaddr_in in;
    std::memcpy(&in, raw, sizeof in);
    address.family = 4;
    std::memcpy(address.bytes.data(), &in.sin_addr, 4);
  } else {
    sockaddr_in6 in;
    std::memcpy(&in, raw, sizeof in);
    address.family = 6;
    std::memcpy(address.bytes.data(), &in.sin6_addr, 16);
  }
  return address;
}

bool same_subnet(const NetworkInterface& interface, const SocketAddress& target) {
  if (interface.address.family != target.family) return false;
  int bits = interface.prefix_bits;
  for (size_t i = 0; i < address_bytes(target) && bits > 0; ++i, bits -= 8) {
    const auto mask = static_cast<uint8_t>(bits >= 8 ? 0xff : 0xff << (8 - bits));
    if ((interface.address.bytes[i] & mask) != (target.bytes[i] & mask)) return false;
  }
  return true;
}

struct Selection {
  bool exclude = false;
  bool exact = false;
  std::vector<std::string_view> names;

  explicit Selection(std::string_view text) {
    // "^" and "=" may stand together, in either order.
    while (!text.empty() && (text.front() == '^' || text.front() == '=')) {
      (text.front() == '^' ? exclude : exact) = true;
      text.remove_prefix(1);
    }
    while (!text.empty()) {
      const size_t comma = std::min(text.find(','), text.size());
      if (comma > 0) names.push_back(text.substr(0, comma));
      text.remove_prefix(std::min(comma + 1, text.size()));
    }
  }
  bool allows(std::string_view name) const {
    if (names.empty()) return true;
    const bool named = std::any_of(names.begin(), names.end(), [&](std::string_view candidate) {
      return exact ? name == candidate : name.starts_with(candidate);
    });
    return named != exclude;
  }
};

// Smaller is better.
int preference(const NetworkInterface& interface, const std::optional<SocketAddress>& target) {
  int rank = 1;
  if (target && same_subnet(interface, *target)) {
    rank = 0;
  } else if (interface.loopback) {
    rank = 3;
  } else if (interface.name.starts_with("docker")) {
    rank = 2;
  }
  return rank * 2 + (interface.address.family == 6 ? 1 : 0);
}

}  // namespace

Result<std::vector<NetworkInterface>> list_network_interfaces() {
  ifaddrs* first = nullptr;
  if (getifaddrs(&first) != 0) {
    return Status(MK_ERROR_SYSTEM, format("cannot list the network interfaces: %s", std::strerror(errno)));
  }
  const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> owner(first, freeifaddrs);
  std::vector<NetworkInterface> interfaces;
  for (const ifaddrs* entry = first; entry; entry = entry->ifa_next) {
    if (!entry->ifa_addr || !(entry->ifa_flags & IFF_UP)) continue;
    if (entry->ifa_addr->sa_family != AF_INET && entry->ifa_addr->sa_family != AF_INET6) continue;
    NetworkInterface interface;
    interface.name = entry->ifa_name;
    interface.address = read_address(entry->ifa_addr);
    if (interface.address.family == 6 && interface.address.bytes[0] == 0xfe &&
        (interface.address.bytes[1] & 0xc0) == 0x80) {
      continue;
    }
    if (entry->ifa_netmask) {
      // Some systems leave the family of the mask unset.
      sockaddr_storage mask{};
      std::memcpy(&mask, entry->ifa_netmask,
                  interface.address.family == 4 ? sizeof(sockaddr_in) : sizeof(sockaddr_in6));
      mask.ss_family = entry->ifa_addr->sa_family;
      for (const uint8_t byte : read_address(reinterpret_cast<sockaddr*>(&mask)).bytes) {
        interface.prefix_bits += std::popcount(byte);
      }
    }
    interface.loopback = (entry->ifa_flags & IFF_LOOPBACK) != 0;
    interfaces.push_back(std::move(interface));
  }
  return interfaces;
}

Result<NetworkInterface> choose_network_interface(std::span<const NetworkInterface> interfaces,
                                                  const std::string& selection,
                                                  const std::optional<SocketAddress>& target) {
  const Selection selected(selection);
  const NetworkInterface* best = nullptr;
  std::string seen;
  for (const NetworkInterface& interface : interfaces) {
    seen += (seen.empty() ? "" : ", ") + interface.name;
    if (!selected.allows(interface.name) || (target && interface.address.family != target->family)) continue;
    if (!best || preference(interface, target) < preference(*best, target)) best = &interface;
  }
  if (best) return *best;
  return Status(MK_ERROR_NETWORK,
                format("no usable network interface: MK_SOCKET_IFNAME is \"%s\"%s, and this machine has %s",
                       selection.c_str(),
                       target ? (target->family == 4 ? ", the root has an IPv4 address"
                                                     : ", the root has an IPv6 address")
                              : "",
                       seen.empty() ? "none with an address" : seen.c_str()));
}

}  // namespace mk
