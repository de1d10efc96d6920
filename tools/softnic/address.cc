// SPDX-License-Identifier: MIT
#include "address.h"

#include <array>
#include <cstring>

namespace softnic {
namespace {

constexpr int kPortShift = 14;
constexpr uint8_t kIpv4Network = 10;
// EUI-64: locally administered, "mk", then port and endpoint.
constexpr std::array<uint8_t, 5> kGuidPrefix = {0x02, 0x6d, 0x6b, 0xff, 0xfe};

bool is_ipv4(LinkKind kind, int index) { return kind == LinkKind::roce && index >= 2; }

}  // namespace

uint16_t lid_of(Address address) {
  return static_cast<uint16_t>(address.endpoint | (address.port - 1) << kPortShift);
}

std::optional<Address> address_of_lid(uint16_t lid) {
  const Address address{static_cast<uint16_t>(lid & ((1u << kPortShift) - 1)),
                        static_cast<uint8_t>((lid >> kPortShift) + 1)};
  if (address.endpoint == 0 || lid >= 0xc000) return std::nullopt;
  return address;
}

int gid_table_length(LinkKind kind) { return kind == LinkKind::roce ? 4 : 1; }

__be64 guid_of(Address address) {
  std::array<uint8_t, 8> bytes{};
  std::memcpy(bytes.data(), kGuidPrefix.data(), kGuidPrefix.size());
  bytes[5] = address.port;
  bytes[6] = static_cast<uint8_t>(address.endpoint >> 8);
  bytes[7] = static_cast<uint8_t>(address.endpoint);
  __be64 guid = 0;
  std::memcpy(&guid, bytes.data(), sizeof(guid));
  return guid;
}

ibv_gid gid_of(LinkKind kind, Address address, int index) {
  ibv_gid gid{};
  if (is_ipv4(kind, index)) {
    gid.raw[10] = gid.raw[11] = 0xff;
    gid.raw[12] = kIpv4Network;
    gid.raw[13] = address.port;
    gid.raw[14] = static_cast<uint8_t>(address.endpoint >> 8);
    gid.raw[15] = static_cast<uint8_t>(address.endpoint);
    return gid;
  }
  gid.raw[0] = 0xfe;
  gid.raw[1] = 0x80;
  const __be64 guid = guid_of(address);
  std::memcpy(gid.raw + 8, &guid, sizeof(guid));
  return gid;
}

uint32_t gid_type(LinkKind kind, int index) {
  if (kind != LinkKind::roce) return IBV_GID_TYPE_IB;
  return index % 2 == 0 ? IBV_GID_TYPE_ROCE_V1 : IBV_GID_TYPE_ROCE_V2;
}

uint8_t path_type(LinkKind kind, int gid_index) {
  return kind == LinkKind::roce ? static_cast<uint8_t>(gid_index) : 0;
}

std::optional<Address> address_of_gid(const ibv_gid& gid) {
  Address address{static_cast<uint16_t>(gid.raw[14] << 8 | gid.raw[15]), gid.raw[13]};
  static constexpr std::array<uint8_t, 12> kMapped = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
  static constexpr std::array<uint8_t, 8> kLinkLocal = {0xfe, 0x80, 0, 0, 0, 0, 0, 0};
  const bool mapped = std::memcmp(gid.raw, kMapped.data(), kMapped.size()) == 0 && gid.raw[12] == kIpv4Network;
  const bool link_local = std::memcmp(gid.raw, kLinkLocal.data(), kLinkLocal.size()) == 0 &&
                          std::memcmp(gid.raw + 8, kGuidPrefix.data(), kGuidPrefix.size()) == 0;
  if ((!mapped && !link_local) || address.endpoint == 0) return std::nullopt;
  return address;
}

}  // namespace softnic
