// SPDX-License-Identifier: MIT
// The names of a NIC on the fabric. Every opened device is an endpoint with a number of its own; its LIDs and
// GIDs carry that number and the port.
#pragma once

#include <infiniband/verbs.h>

#include <cstdint>
#include <optional>

#include "configuration.h"

namespace softnic {

inline constexpr uint16_t kMaxEndpoints = 0x3ffe;  // 14 bits in a LID, above them the port

struct Address {
  uint16_t endpoint = 0;  // 0: nowhere
  uint8_t port = 1;

  bool operator==(const Address&) const = default;
};

uint16_t lid_of(Address address);
std::optional<Address> address_of_lid(uint16_t lid);

// The GID table: one entry on InfiniBand and EFA; on Ethernet link-local IPv6 and mapped IPv4, each for RoCE v1
// and v2.
int gid_table_length(LinkKind kind);
ibv_gid gid_of(LinkKind kind, Address address, int index);
uint32_t gid_type(LinkKind kind, int index);
std::optional<Address> address_of_gid(const ibv_gid& gid);

// Two ends understand each other when these agree: RoCE version and IP version.
uint8_t path_type(LinkKind kind, int gid_index);

__be64 guid_of(Address address);

}  // namespace softnic
