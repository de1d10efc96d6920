// SPDX-License-Identifier: MIT
// Each rank listens on an abstract socket of random name, which vanishes with the process. Names and tokens
// travel through the exchange; the higher rank of a pair connects to the lower one.
#include "connect.h"

#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>

#include "wire.h"

namespace mk::loopback {
namespace {

constexpr size_t kNameBytes = 16;
// Strangers that connect and say nothing; beyond so many the oldest is dropped.
constexpr size_t kMaxStrangers = 64;
// Instead of the rank that a hello names.
constexpr int kWrong = -1;
constexpr int kSilent = -2;
constexpr int kClosed = -3;

struct Card {  // what a rank gathers, followed by its host's identity, or by a sentence when it failed
  uint8_t name[kNameBytes];
  uint8_t token[kTokenBytes];
  uint8_t failed;  // its mk_status_t
};
static_assert(sizeof(Card) == kNameBytes + kTokenBytes + 1);

struct Introduced {
  Card card;
  std::string text;
};

Status system_error(const char* what) {
  return Status(MK_ERROR_SYSTEM, format("loopback: cannot %s: %s", what, std::strerror(errno)));
}

socklen_t make_address(const uint8_t* name, sockaddr_un* address) {
  *address = {};
  address->sun_family = AF_UNIX;
  const std::string prefix = "mk-loopback-";
  std::string text(1, '\0');  // abstract: no file
  text += prefix;
  for (size_t i = 0; i < kNameBytes; ++i) text += format("%02x", name[i]);
  std::memcpy(address->sun_path, text.data(), text.size());
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + text.size());
}

Status listen_on(const Card& card, FileDescriptor* listener) {
  *listener = FileDescriptor(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!listener->valid()) return system_error("make a socket");
  sockaddr_un address;
  const socklen_t length = make_address(card.name, &address);
  if (bind(listener->get(), reinterpret_cast<sockaddr*>(&address), length) != 0)
    return system_error("bind a socket");
  if (listen(listener->get(), SOMAXCONN) != 0) return system_error("listen on a socket");
  return {};
}

Result<std::vector<Introduced>> introduce(const Card& mine, const std::string& text, Exchange& exchange,
                                          Deadline deadline, const char* what) {
  Bytes block(sizeof mine + text.size());
  std::memcpy(block.data(), &mine, sizeof mine);
  std::memcpy(block.data() + sizeof mine, text.data(), text.size());
  auto blocks = exchange.all_gather(block, deadline, what);
  if (!blocks.ok()) return blocks.status();
  std::vector<Introduced> all(blocks->size());
  for (size_t rank = 0; rank < all.size(); ++rank) {
    const Bytes& theirs = blocks.value()[rank];
    if (theirs.size() < sizeof(Card)) {
      return Status(MK_ERROR_NETWORK, format("%s: rank %zu sent %zu bytes, expected at least %zu", what, rank,
                                             theirs.size(), sizeof(Card)));
    }
    std::memcpy(&all[rank].card, theirs.data(), sizeof(Card));
    all[rank].text.assign(reinterpret_cast<const char*>(theirs.data()) + sizeof(Card),
                          theirs.size() - sizeof(Card));
  }
  for (size_t rank = 0; rank < all.size(); ++rank) {
    if (const uint8_t failed = all[rank].card.failed; failed != 0) {
      const auto code = failed <= MK_ERROR_INTERNAL ? static_cast<mk_status_t>(failed) : MK_ERROR_INTERNAL;
      return Status(code, format("%s: rank %zu: %s", what, rank, all[rank].text.c_str()));
    }
  }
  return all;
}

// Connects this rank to its peers, in one loop so that no stranger can hold up the others.
class Mesh {
 public:
  Mesh(const Topology& topology, const std::vector<Introduced>& all, FileDescriptor listener)
      : topology_(topology),
        all_(all),
        listener_(std::move(listener)),
        peers_(all.size()),
        waiting_(all.size()) {}

  Status connect_all(const AbortToken& abort, Deadline deadline);
  std::vector<FileDescriptor> take() { return std::move(peers_); }

 private:
  bool is_peer(int rank) const { return !topology_.same_node(rank, topology_.rank); }
  const uint8_t* token(int rank) const { return all_[static_cast<size_t>(rank)].card.token; }
  std::string missing() const;
  Status dial();
  void accept_strangers();
  void hear_strangers();
  Status hear_answers();
  bool send_hello(const FileDescriptor& channel, int to);
  // The rank of the sender of a valid hello, or one of the three below.
  int hear(const FileDescriptor& channel);
  void wait(const AbortToken& abort, Deadline deadline);

  const Topology& topology_;
  const std::vector<Introduced>& all_;
  FileDescriptor listener_;
  std::vector<FileDescriptor> peers_;      // introduced both ways
  std::vector<FileDescriptor> waiting_;    // connected to a lower rank, its answer outstanding
  std::vector<FileDescriptor> strangers_;  // accepted, their hello outstanding
};

std::string Mesh::missing() const {
  std::string ranks;
  for (int rank = 0; rank < topology_.nranks; ++rank) {
    if (is_peer(rank) && !peers_[static_cast<size_t>(rank)].valid()) ranks += format(" %d", rank);
  }
  return ranks;
}

bool Mesh::send_hello(const FileDescriptor& channel, int to) {
  Hello hello{kHelloMagic, static_cast<uint32_t>(topology_.rank), {}};
  std::memcpy(hello.token, token(to), kTokenBytes);
  return send(channel.get(), &hello, sizeof hello, MSG_NOSIGNAL | MSG_DONTWAIT) == sizeof hello;
}

int Mesh::hear(const FileDescriptor& channel) {
  Hello hello;
  const ssize_t got = recv(channel.get(), &hello, sizeof hello, MSG_DONTWAIT | MSG_TRUNC);
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return kSilent;
  if (got <= 0) return kClosed;
  if (got != sizeof hello || hello.magic != kHelloMagic) return kWrong;
  if (std::memcmp(hello.token, token(topology_.rank), kTokenBytes) != 0) return kWrong;
  if (hello.rank >= static_cast<uint32_t>(topology_.nranks)) return kWrong;
  return static_cast<int>(hello.rank);
}

Status Mesh::dial() {
  for (int rank = 0; rank < topology_.rank; ++rank) {
    const size_t i = static_cast<size_t>(rank);
    if (!is_peer(rank) || peers_[i].valid() || waiting_[i].valid()) continue;
    FileDescriptor channel(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!channel.valid()) return system_error("make a socket");
    sockaddr_un address;
    const socklen_t length = make_address(all_[i].card.name, &address);
    if (connect(channel.get(), reinterpret_cast<sockaddr*>(&address), length) != 0) {
      if (errno == EAGAIN || errno == EINTR) continue;  // the backlog is full: later
      return Status(MK_ERROR_NETWORK,
                    format("loopback: cannot connect to rank %d: %s", rank, std::strerror(errno)));
    }
    if (send_hello(channel, rank)) waiting_[i] = std::move(channel);  // else it was closed at once: later
  }
  return {};
}

void Mesh::accept_strangers() {
  for (size_t n = 0; n < kMaxStrangers; ++n) {
    FileDescriptor channel(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!channel.valid()) return;
    if (strangers_.size() == kMaxStrangers) hear_strangers();
    if (strangers_.size() == kMaxStrangers) strangers_.erase(strangers_.begin());
    strangers_.push_back(std::move(channel));
  }
}

void Mesh::hear_strangers() {
  for (FileDescriptor& stranger : strangers_) {
    const int rank = hear(stranger);
    if (rank == kSilent) continue;
    const bool expected = rank > topology_.rank && is_peer(rank) && !peers_[static_cast<size_t>(rank)].valid();
    if (expected && send_hello(stranger, rank)) peers_[static_cast<size_t>(rank)] = std::move(stranger);
    stranger.reset();
  }
  std::erase_if(strangers_, [](const FileDescriptor& stranger) { return !stranger.valid(); });
}

Status Mesh::hear_answers() {
  for (size_t i = 0; i < waiting_.size(); ++i) {
    if (!waiting_[i].valid()) continue;
    const int rank = hear(waiting_[i]);
    if (rank == kSilent) continue;
    if (rank == kClosed) {  // crowded out by strangers: dial again
      waiting_[i].reset();
      continue;
    }
    if (rank != static_cast<int>(i)) {
      return Status(MK_ERROR_NETWORK, format("loopback: what answers as rank %zu does not know its token", i));
    }
    peers_[i] = std::move(waiting_[i]);
  }
  return {};
}

void Mesh::wait(const AbortToken& abort, Deadline deadline) {
  std::vector<pollfd> descriptors{{listener_.get(), POLLIN, 0}, {abort.fd(), POLLIN, 0}};
  int limit_ms = std::min(deadline.left_ms(), 100);
  for (const FileDescriptor& stranger : strangers_) descriptors.push_back({stranger.get(), POLLIN, 0});
  for (size_t i = 0; i < waiting_.size(); ++i) {
    if (waiting_[i].valid()) descriptors.push_back({waiting_[i].get(), POLLIN, 0});
    const int rank = static_cast<int>(i);
    const bool to_dial = rank < topology_.rank && is_peer(rank) && !waiting_[i].valid() && !peers_[i].valid();
    if (to_dial) limit_ms = std::min(limit_ms, 2);
  }
  poll(descriptors.data(), descriptors.size(), limit_ms);
}

Status Mesh::connect_all(const AbortToken& abort, Deadline deadline) {
  for (;;) {
    MK_RETURN_IF_ERROR(dial());
    accept_strangers();
    hear_strangers();
    MK_RETURN_IF_ERROR(hear_answers());
    if (missing().empty()) return {};
    if (abort.raised()) return abort.reason();
    if (deadline.passed()) {
      return Status(MK_ERROR_TIMEOUT, "loopback: no connection to rank(s)" + missing() + " by the deadline");
    }
    wait(abort, deadline);
  }
}

// MK_ERROR_UNSUPPORTED, the same on every rank, when two ranks are on different hosts.
Status check_hosts(const std::vector<Introduced>& all) {
  for (size_t rank = 1; rank < all.size(); ++rank) {
    if (all[rank].text != all[0].text) {
      return Status(MK_ERROR_UNSUPPORTED,
                    format("loopback connects ranks of one host; rank 0 is on %s and rank %zu on %s",
                           all[0].text.c_str(), rank, all[rank].text.c_str()));
    }
  }
  return {};
}

}  // namespace

Result<std::vector<FileDescriptor>> connect_peers(const Topology& topology, Exchange& exchange,
                                                  const AbortToken& abort, Status ready, Deadline deadline) {
  Card card{};
  FileDescriptor listener;
  Status status = std::move(ready);
  if (!status.ok()) {
    // Said to the others below.
  } else if (getrandom(&card, kNameBytes + kTokenBytes, 0) != static_cast<ssize_t>(kNameBytes + kTokenBytes)) {
    status = system_error("get random bytes");
  } else {
    status = listen_on(card, &listener);
  }
  card.failed = static_cast<uint8_t>(status.code());
  auto all = introduce(card, status.ok() ? host_identity() : status.sentence(), exchange, deadline,
                       "introducing loopback ranks");
  if (!status.ok()) return status;
  if (!all.ok()) return all.status();
  MK_RETURN_IF_ERROR(check_hosts(all.value()));
  Mesh mesh(topology, all.value(), std::move(listener));
  // Half of the time left, so that a failure can still be told to the others.
  const auto half = std::chrono::milliseconds(deadline.left_ms() / 2);
  status = mesh.connect_all(abort, Deadline::after(half));
  card.failed = static_cast<uint8_t>(status.code());
  auto connected = introduce(card, status.sentence(), exchange, deadline, "connecting loopback ranks");
  if (!status.ok()) return status;
  if (!connected.ok()) return connected.status();
  return mesh.take();
}

}  // namespace mk::loopback
