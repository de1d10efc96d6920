// SPDX-License-Identifier: MIT
#include "socket.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace mk {
namespace {

struct NativeAddress {
  sockaddr_storage storage{};
  socklen_t length = 0;
  sockaddr* get() { return reinterpret_cast<sockaddr*>(&storage); }
};

NativeAddress to_native(const SocketAddress& address) {
  NativeAddress native;
  if (address.family == 4) {
    sockaddr_in in{};
    in.sin_family = AF_INET;
    in.sin_port = htons(address.port);
    std::memcpy(&in.sin_addr, address.bytes.data(), 4);
    std::memcpy(&native.storage, &in, sizeof in);
    native.length = sizeof in;
  } else {
    sockaddr_in6 in{};
    in.sin6_family = AF_INET6;
    in.sin6_port = htons(address.port);
    std::memcpy(&in.sin6_addr, address.bytes.data(), 16);
    std::memcpy(&native.storage, &in, sizeof in);
    native.length = sizeof in;
  }
  return native;
}

SocketAddress from_native(const sockaddr_storage& storage) {
  SocketAddress address;
  if (storage.ss_family == AF_INET) {
    sockaddr_in in;
    std::memcpy(&in, &storage, sizeof in);
    address.family = 4;
    address.port = ntohs(in.sin_port);
    std::memcpy(address.bytes.data(), &in.sin_addr, 4);
  } else if (storage.ss_family == AF_INET6) {
    sockaddr_in6 in;
    std::memcpy(&in, &storage, sizeof in);
    address.family = 6;
    address.port = ntohs(in.sin6_port);
    std::memcpy(address.bytes.data(), &in.sin6_addr, 16);
  }
  return address;
}

void set_option(int fd, int level, int name, int value) { setsockopt(fd, level, name, &value, sizeof value); }

Result<FileDescriptor> make_socket(const SocketAddress& address) {
  FileDescriptor made(
      socket(address.family == 4 ? AF_INET : AF_INET6, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!made.valid()) {
    return Status(MK_ERROR_SYSTEM,
                  format("no socket for %s: %s", address.text().c_str(), std::strerror(errno)));
  }
  return made;
}

}  // namespace

std::string SocketAddress::text() const {
  char host[INET6_ADDRSTRLEN] = "?";
  inet_ntop(family == 4 ? AF_INET : AF_INET6, bytes.data(), host, sizeof host);
  return format(family == 4 ? "%s:%u" : "[%s]:%u", host, static_cast<unsigned>(port));
}

Result<FileDescriptor> listen_on(SocketAddress& address) {
  Result<FileDescriptor> made = make_socket(address);
  if (!made.ok()) return made;
  const int fd = made->get();
  // A port in TIME_WAIT after an earlier job is free for us; one that is listened on is not.
  set_option(fd, SOL_SOCKET, SO_REUSEADDR, 1);
  if (address.family == 6) set_option(fd, IPPROTO_IPV6, IPV6_V6ONLY, 1);
  NativeAddress native = to_native(address);
  if (bind(fd, native.get(), native.length) != 0 || listen(fd, SOMAXCONN) != 0) {
    const char* hint =
        errno == EADDRINUSE ? "; another program uses this port: choose another one, or wait for it" : "";
    return Status(MK_ERROR_NETWORK,
                  format("cannot listen on %s: %s%s", address.text().c_str(), std::strerror(errno), hint));
  }
  address.port = bound_address(fd).port;
  return made;
}

Result<FileDescriptor> start_connect(const SocketAddress& address) {
  Result<FileDescriptor> made = make_socket(address);
  if (!made.ok()) return made;
  set_option(made->get(), IPPROTO_TCP, TCP_NODELAY, 1);
  NativeAddress native = to_native(address);
  if (connect(made->get(), native.get(), native.length) != 0 && errno != EINPROGRESS) {
    return Status(MK_ERROR_NETWORK, std::strerror(errno));
  }
  return made;
}

int connect_error(int fd) {
  int error = 0;
  socklen_t length = sizeof error;
  return getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length) == 0 ? error : errno;
}

FileDescriptor accept_connection(int listener, bool* exhausted) {
  FileDescriptor accepted(accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  *exhausted = !accepted.valid() && (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM);
  if (accepted.valid()) set_option(accepted.get(), IPPROTO_TCP, TCP_NODELAY, 1);
  return accepted;
}

SocketAddress bound_address(int fd) {
  sockaddr_storage storage{};
  socklen_t length = sizeof storage;
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&storage), &length) != 0) return SocketAddress();
  return from_native(storage);
}

void set_user_timeout(int fd, std::chrono::milliseconds span) {
  set_option(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, static_cast<int>(span.count()));
}

}  // namespace mk
