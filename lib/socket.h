// SPDX-License-Identifier: MIT
// Non-blocking TCP sockets, IPv4 and IPv6.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <string>

#include "file_descriptor.h"
#include "status.h"

namespace mk {

struct SocketAddress {
  uint8_t family = 0;  // 4 or 6; 0: none
  uint16_t port = 0;
  std::array<uint8_t, 16> bytes{};  // network order; IPv4 in the first four

  bool valid() const { return family == 4 || family == 6; }
  std::string text() const;  // "10.0.0.1:4000" or "[fd00::1]:4000"
  bool operator==(const SocketAddress&) const = default;
};

// Listens on `address`; port 0 is replaced by the one that the system chose. MK_ERROR_NETWORK names address and
// port.
Result<FileDescriptor> listen_on(SocketAddress& address);
// Starts to connect; the descriptor is writable once connected or failed, and connect_error() says which.
Result<FileDescriptor> start_connect(const SocketAddress& address);
int connect_error(int fd);
// A waiting connection, empty when there is none; *exhausted says that the system had no descriptor for it.
FileDescriptor accept_connection(int listener, bool* exhausted);
// The address of this end of a socket.
SocketAddress bound_address(int fd);
// Bytes that stay unacknowledged for `span` end the connection.
void set_user_timeout(int fd, std::chrono::milliseconds span);

}  // namespace mk
