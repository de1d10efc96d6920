// SPDX-License-Identifier: MIT
#include "descriptor_exchange.h"

#include <poll.h>
#include <sodium.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <string>

namespace mk {
namespace {

constexpr uint64_t kMagic = 0x6d6b2d6673776170;  // "mk-fswap"

struct Greeting {
  uint64_t magic;
  RandomToken secret;  // the receiver's
  int32_t rank;        // the sender's
  int32_t reserved;
};
static_assert(sizeof(Greeting) == 32);

// What poll(2) cannot announce (room in a listener's queue, an abort without descriptor) is looked at this
// often.
constexpr int kLookAgainMs = 10;
constexpr int kAbortLookMs = 100;

Status system_error(const char* call, int error) {
  return Status(MK_ERROR_SYSTEM, format("handing memory to the other processes of this host: %s failed: %s",
                                        call, std::strerror(error)));
}

// The abstract address "\0mk-<32 hexadecimal digits>".
socklen_t fill_address(const RandomToken& name, sockaddr_un& address) {
  address = {};
  address.sun_family = AF_UNIX;
  std::string text = "mk-";
  for (const std::byte value : name) text += format("%02x", static_cast<unsigned>(value));
  std::memcpy(address.sun_path + 1, text.data(), text.size());
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + text.size());
}

bool same_user(int socket_fd) {
  ucred credentials{};
  socklen_t length = sizeof credentials;
  return getsockopt(socket_fd, SOL_SOCKET, SO_PEERCRED, &credentials, &length) == 0 &&
         credentials.uid == geteuid();
}

FileDescriptor open_socket() {
  return FileDescriptor(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
}

// Room for one descriptor, aligned as the kernel's header wants it.
union ControlBuffer {
  cmsghdr header;
  char bytes[CMSG_SPACE(sizeof(int))];
};

class Swap {
 public:
  Swap(int rank, const DescriptorAddress& address, int listener, std::vector<FileDescriptor> senders,
       std::deque<FileDescriptor>& accepted, int mine, std::span<const DescriptorPeer> peers)
      : rank_(rank),
        address_(address),
        listener_(listener),
        senders_(std::move(senders)),
        accepted_(accepted),
        mine_(mine),
        peers_(peers) {
    received_.resize(peers.size());
  }

  Result<std::vector<FileDescriptor>> run(AbortToken& abort, Deadline deadline) {
    while (true) {
      for (size_t index = 0; index < peers_.size(); ++index) {
        if (senders_[index].valid()) MK_RETURN_IF_ERROR(try_send(index));
      }
      MK_RETURN_IF_ERROR(accept_all());
      read_all();
      MK_RETURN_IF_ERROR(failure_);
      if (missing().empty()) return std::move(received_);
      if (abort.raised()) return abort.reason();
      if (deadline.passed()) {
        return Status(MK_ERROR_TIMEOUT,
                      format("rank %d waited for the shared memory of other processes of this host until the "
                             "deadline passed; missing: %s",
                             rank_, missing().c_str()));
      }
      MK_RETURN_IF_ERROR(wait(abort, deadline));
    }
  }

 private:
  bool all_sent() const {
    for (const FileDescriptor& sender : senders_) {
      if (sender.valid()) return false;
    }
    return true;
  }

  std::string missing() const {
    std::string names;
    for (size_t index = 0; index < peers_.size(); ++index) {
      if (received_[index].valid() && !senders_[index].valid()) continue;
      names += format("%srank %d", names.empty() ? "" : ", ", peers_[index].rank);
    }
    return names;
  }

  Status lost(const DescriptorPeer& peer, const char* call, int error) const {
    return Status(
        MK_ERROR_REMOTE,
        format("rank %d could not hand its shared memory to rank %d: %s: %s; that process has probably died",
               rank_, peer.rank, call, std::strerror(error)));
  }

  // Connects and sends without blocking; the kernel keeps both until the peer accepts. A full queue is tried
  // again.
  Status try_send(size_t index) {
    const DescriptorPeer& peer = peers_[index];
    const int sender = senders_[index].get();
    sockaddr_un address;
    const socklen_t length = fill_address(peer.address.name, address);
    if (connect(sender, reinterpret_cast<const sockaddr*>(&address), length) != 0 && errno != EISCONN) {
      if (errno == EAGAIN || errno == EINTR) return {};
      return lost(peer, "connect", errno);
    }
    if (!same_user(sender)) {
      return Status(MK_ERROR_SYSTEM,
                    format("the socket of rank %d belongs to another user; run all ranks of a host as one user",
                           peer.rank));
    }
    Greeting greeting{kMagic, peer.address.secret, rank_, 0};
    iovec part{&greeting, sizeof greeting};
    ControlBuffer control{};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control.bytes;
    message.msg_controllen = sizeof control.bytes;
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(header), &mine_, sizeof mine_);
    if (sendmsg(sender, &message, MSG_NOSIGNAL) == static_cast<ssize_t>(sizeof greeting)) {
      senders_[index].reset();
      return {};
    }
    // ETOOMANYREFS: too many descriptors of this user are under way; they arrive, so there will be room.
    if (errno == EAGAIN || errno == EINTR || errno == ETOOMANYREFS) return {};
    if (errno == EPIPE || errno == ECONNRESET) return lost(peer, "send", errno);
    return system_error("sendmsg", errno);
  }

  Status accept_all() {
    while (true) {
      FileDescriptor connection(accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (!connection.valid()) {
        if (errno == EAGAIN) return {};
        if (errno == EINTR || errno == ECONNABORTED) continue;
        return system_error("accept", errno);
      }
      if (!same_user(connection.get())) continue;
      // Strangers that connect and say nothing are pushed out by whoever comes later; ranks have sent already.
      if (accepted_.size() > peers_.size() + 8) accepted_.pop_front();
      accepted_.push_back(std::move(connection));
    }
  }

  // Keeps the connections on which nothing has arrived yet.
  void read_all() {
    std::deque<FileDescriptor> silent;
    for (FileDescriptor& connection : accepted_) {
      if (!read_one(connection.get())) silent.push_back(std::move(connection));
    }
    accepted_ = std::move(silent);
  }

  // True when the connection has served its purpose, or never will.
  bool read_one(int connection) {
    Greeting greeting{};
    iovec part{&greeting, sizeof greeting};
    ControlBuffer control{};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control.bytes;
    message.msg_controllen = sizeof control.bytes;
    const ssize_t length = recvmsg(connection, &message, MSG_CMSG_CLOEXEC);
    if (length < 0) return errno != EAGAIN && errno != EINTR;
    FileDescriptor descriptor;
    for (cmsghdr* header = CMSG_FIRSTHDR(&message); header; header = CMSG_NXTHDR(&message, header)) {
      if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
      if (header->cmsg_len != CMSG_LEN(sizeof(int))) continue;
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(header), sizeof fd);
      descriptor = FileDescriptor(fd);
    }
    if (length != static_cast<ssize_t>(sizeof greeting) || greeting.magic != kMagic) return true;
    if (sodium_memcmp(greeting.secret.data(), address_.secret.data(), address_.secret.size()) != 0) return true;
    if (!descriptor.valid()) {
      failure_ =
          Status(MK_ERROR_SYSTEM,
                 format("the shared memory of rank %d could not be received: no descriptor came with it, most "
                        "likely because this process has too many open files; raise ulimit -n",
                        greeting.rank));
    }
    for (size_t index = 0; index < peers_.size(); ++index) {
      if (peers_[index].rank == greeting.rank && !received_[index].valid())
        received_[index] = std::move(descriptor);
    }
    return true;
  }

  Status wait(AbortToken& abort, Deadline deadline) const {
    std::vector<pollfd> watched{{listener_, POLLIN, 0}};
    for (const FileDescriptor& connection : accepted_) watched.push_back({connection.get(), POLLIN, 0});
    if (abort.fd() >= 0) watched.push_back({abort.fd(), POLLIN, 0});
    int timeout = deadline.left_ms();
    if (abort.fd() < 0) timeout = std::min(timeout, kAbortLookMs);
    if (!all_sent()) timeout = std::min(timeout, kLookAgainMs);
    if (poll(watched.data(), watched.size(), timeout) < 0 && errno != EINTR) return system_error("poll", errno);
    return {};
  }

  const int rank_;
  const DescriptorAddress& address_;
  const int listener_;
  std::vector<FileDescriptor> senders_;  // closed once sent
  std::deque<FileDescriptor>& accepted_;
  const int mine_;
  const std::span<const DescriptorPeer> peers_;
  std::vector<FileDescriptor> received_;
  Status failure_;
};

}  // namespace

Result<RandomToken> make_random_token() {
  RandomToken token;
  if (getrandom(token.data(), token.size(), 0) != static_cast<ssize_t>(token.size())) {
    return Status(MK_ERROR_SYSTEM, format("getrandom gave no random bytes: %s", std::strerror(errno)));
  }
  return token;
}

Result<DescriptorExchange> DescriptorExchange::open(int rank, int num_peers) {
  Result<RandomToken> name = make_random_token();
  if (!name.ok()) return name.status();
  Result<RandomToken> secret = make_random_token();
  if (!secret.ok()) return secret.status();
  FileDescriptor listener = open_socket();
  if (!listener.valid()) return system_error("socket", errno);
  sockaddr_un address;
  const socklen_t length = fill_address(name.value(), address);
  if (bind(listener.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0) {
    return system_error("bind", errno);
  }
  if (listen(listener.get(), num_peers + 8) != 0) return system_error("listen", errno);
  std::vector<FileDescriptor> senders;
  for (int peer = 0; peer < num_peers; ++peer) {
    senders.push_back(open_socket());
    if (!senders.back().valid()) return system_error("socket", errno);
  }
  return DescriptorExchange(rank, {name.value(), secret.value()}, std::move(listener), std::move(senders));
}

Result<std::vector<FileDescriptor>> DescriptorExchange::swap(int mine, std::span<const DescriptorPeer> peers,
                                                             AbortToken& abort, Deadline deadline) {
  if (peers.size() != senders_.size()) {
    return Status(MK_ERROR_INTERNAL, format("descriptors were to be handed to %zu ranks, not to %zu",
                                            senders_.size(), peers.size()));
  }
  return Swap(rank_, address_, listener_.get(), std::move(senders_), accepted_, mine, peers)
      .run(abort, deadline);
}

}  // namespace mk
