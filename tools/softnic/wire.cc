// SPDX-License-Identifier: MIT
#include "wire.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "address.h"

namespace softnic {
namespace {

constexpr int kBacklog = 1024;
constexpr int kMaxEvents = 64;

// An abstract name: gone with the process, and seen only in its network namespace.
socklen_t name_endpoint(const std::string& fabric, uint16_t number, sockaddr_un& address) {
  address = {};
  address.sun_family = AF_UNIX;
  const std::string name =
      "mk-softnic/" + std::to_string(geteuid()) + "/" + fabric + "/" + std::to_string(number);
  const size_t length = std::min(name.size(), sizeof(address.sun_path) - 1);
  std::memcpy(address.sun_path + 1, name.data(), length);
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + length);
}

// The peer's process; 0 when it belongs to another user.
pid_t peer_process(int fd) {
  ucred credentials{};
  socklen_t length = sizeof(credentials);
  if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &credentials, &length) != 0) return 0;
  return credentials.uid == geteuid() ? credentials.pid : 0;
}

constexpr size_t kMaxDescriptors = 4;  // of a message; packets have one at most

union Control {
  cmsghdr header;
  char bytes[CMSG_SPACE(kMaxDescriptors * sizeof(int))];
};

// `descriptor` -1: none.
ssize_t send_bytes(int fd, std::byte* bytes, size_t length, int descriptor) {
  iovec part{bytes, length};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  Control control{};
  if (descriptor >= 0) {
    message.msg_control = control.bytes;
    message.msg_controllen = CMSG_SPACE(sizeof(int));
    cmsghdr* const header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(header), &descriptor, sizeof(int));
  }
  return sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
}

ssize_t receive_bytes(int fd, std::byte* bytes, size_t length, std::deque<int>& descriptors) {
  iovec part{bytes, length};
  Control control{};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.bytes;
  message.msg_controllen = sizeof(control.bytes);
  const ssize_t got = recvmsg(fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  if (got < 0) return got;
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr; header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int descriptor = -1;
      std::memcpy(&descriptor, CMSG_DATA(header) + i * sizeof(int), sizeof(int));
      descriptors.push_back(descriptor);
    }
  }
  return got;
}

bool is_well_formed(const Packet& packet) {
  return packet.num_segments <= kMaxSegments && (packet.is_inline == 0 || packet.bytes <= kMaxInlineBytes) &&
         packet.size == kPacketHead + payload_bytes(packet);
}

}  // namespace

Link::~Link() {
  if (fd >= 0) ::close(fd);
  for (const Departure& departure : departures) ::close(departure.descriptor);
  for (const int descriptor : arrivals) ::close(descriptor);
}

int Link::take_descriptor() {
  if (arrivals.empty()) return -1;
  const int descriptor = arrivals.front();
  arrivals.pop_front();
  return descriptor;
}

Wire::Wire(const std::string& fabric, std::shared_ptr<Inbox> inbox)
    : fabric_(fabric), inbox_(std::move(inbox)) {
  epoll_ = epoll_create1(EPOLL_CLOEXEC);
  listener_ = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (epoll_ < 0 || listener_ < 0) return;
  for (uint16_t number = 1; number <= kMaxEndpoints && endpoint_ == 0; ++number) {
    if (bind_endpoint(number)) endpoint_ = number;
  }
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.fd = listener_;
  if (endpoint_ == 0 || listen(listener_, kBacklog) != 0 ||
      epoll_ctl(epoll_, EPOLL_CTL_ADD, listener_, &event) != 0) {
    endpoint_ = 0;
    return;
  }
  Inbox::announce(fabric_, endpoint_, inbox_);
}

Wire::~Wire() {
  if (endpoint_ != 0) Inbox::withdraw(fabric_, endpoint_);
  inbox_->close();
  by_fd_.clear();
  by_peer_.clear();
  if (listener_ >= 0) ::close(listener_);
  if (epoll_ >= 0) ::close(epoll_);
}

bool Wire::bind_endpoint(uint16_t number) {
  sockaddr_un address;
  const socklen_t length = name_endpoint(fabric_, number, address);
  return bind(listener_, reinterpret_cast<const sockaddr*>(&address), length) == 0;
}

std::shared_ptr<Link> Wire::open(uint16_t peer) {
  bury_closed();
  if (const auto found = in_process_.find(peer); found != in_process_.end()) return found->second;
  if (const auto found = by_peer_.find(peer); found != by_peer_.end()) return found->second;
  if (std::shared_ptr<Inbox> inbox = Inbox::find(fabric_, peer)) {
    auto link = std::make_shared<Link>();
    link->peer = peer;
    link->inbox = std::move(inbox);
    in_process_[peer] = link;
    return link;
  }
  return connect(peer);
}

std::shared_ptr<Link> Wire::connect(uint16_t peer) {
  auto link = std::make_shared<Link>();
  link->fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  sockaddr_un address;
  const socklen_t length = name_endpoint(fabric_, peer, address);
  if (link->fd < 0 || ::connect(link->fd, reinterpret_cast<const sockaddr*>(&address), length) != 0)
    return nullptr;
  link->pid = peer_process(link->fd);
  if (link->pid == 0) return nullptr;
  link->peer = peer;
  by_peer_[peer] = link;
  watch(link);
  Packet hello;
  hello.size = kPacketHead;
  hello.kind = PacketKind::hello;
  hello.source_endpoint = endpoint_;
  return send(link, hello) ? link : nullptr;
}

void Wire::watch(const std::shared_ptr<Link>& link) {
  by_fd_[link->fd] = link;
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.fd = link->fd;
  if (epoll_ctl(epoll_, EPOLL_CTL_ADD, link->fd, &event) != 0) link->dead = true;
}

void Wire::update_interest(const Link& link) const {
  epoll_event event{};
  event.events = link.out.empty() ? EPOLLIN : EPOLLIN | EPOLLOUT;
  event.data.fd = link.fd;
  epoll_ctl(epoll_, EPOLL_CTL_MOD, link.fd, &event);
}

bool Wire::send(const std::shared_ptr<Link>& link, const Packet& packet, int descriptor) {
  if (link->dead) return false;
  if (link->inbox != nullptr) {
    link->dead = !link->inbox->push(packet);
    return !link->dead;
  }
  const std::byte* bytes = reinterpret_cast<const std::byte*>(&packet);
  if (link->out.empty()) unflushed_.push_back(link);
  const int copy = descriptor >= 0 ? fcntl(descriptor, F_DUPFD_CLOEXEC, 0) : -1;
  if (descriptor >= 0 && copy < 0) return false;  // the other end would take the next one for this
  if (copy >= 0) link->departures.push_back({link->out.size(), copy});
  link->out.insert(link->out.end(), bytes, bytes + packet.size);
  return true;
}

void Wire::broadcast(const Packet& packet) {
  for (const auto& entry : in_process_) send(entry.second, packet);
  for (const auto& entry : by_peer_) send(entry.second, packet);
}

void Wire::flush() {
  for (const std::shared_ptr<Link>& link : std::exchange(unflushed_, {})) flush_link(*link);
}

void Wire::flush_link(Link& link) {
  for (bool all = true; all && !link.out.empty();) {
    // Up to the next byte that has a descriptor to take along.
    int descriptor = -1;
    size_t length = link.out.size();
    for (const Link::Departure& departure : link.departures) {
      if (departure.position == 0) {
        descriptor = departure.descriptor;
      } else {
        length = departure.position;
        break;
      }
    }
    const ssize_t sent = send_bytes(link.fd, link.out.data(), length, descriptor);
    // A broken socket shows itself when it is read.
    all = sent == static_cast<ssize_t>(length);
    if (sent <= 0) break;
    if (descriptor >= 0) {
      ::close(descriptor);
      link.departures.pop_front();
    }
    for (Link::Departure& departure : link.departures) departure.position -= static_cast<size_t>(sent);
    link.out.erase(link.out.begin(), link.out.begin() + sent);
  }
  const bool was_full = std::exchange(link.is_full, !link.out.empty());
  if (link.is_full != was_full) update_interest(link);
}

void Wire::accept_links() {
  for (;;) {
    const int fd = accept4(listener_, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0) return;
    auto link = std::make_shared<Link>();
    link->fd = fd;
    link->pid = peer_process(fd);
    if (link->pid != 0) watch(link);
  }
}

bool Wire::read_link(const std::shared_ptr<Link>& link, const Handler& handler) {
  const ssize_t got = receive_bytes(link->fd, read_.data(), read_.size(), link->arrivals);
  if (got > 0) link->in.insert(link->in.end(), read_.begin(), read_.begin() + got);
  if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR)) return false;
  size_t used = 0;
  for (;;) {
    Packet packet;
    const size_t left = link->in.size() - used;
    if (left < kPacketHead) break;
    std::memcpy(static_cast<void*>(&packet), link->in.data() + used, kPacketHead);
    if (!is_well_formed(packet)) return false;
    if (left < packet.size) break;
    std::memcpy(static_cast<void*>(&packet), link->in.data() + used, packet.size);
    used += packet.size;
    if (packet.kind == PacketKind::hello) {
      link->peer = packet.source_endpoint;
    } else if (link->peer == packet.source_endpoint) {
      handler(link, packet);
    }
  }
  link->in.erase(link->in.begin(), link->in.begin() + static_cast<std::ptrdiff_t>(used));
  return true;
}

void Wire::drop(const std::shared_ptr<Link>& link) {
  link->dead = true;
  epoll_ctl(epoll_, EPOLL_CTL_DEL, link->fd, nullptr);
  by_fd_.erase(link->fd);
  const auto found = by_peer_.find(link->peer);
  if (found != by_peer_.end() && found->second == link) by_peer_.erase(found);
}

bool Wire::receive(const Handler& handler, const std::function<void(const std::shared_ptr<Link>&)>& lost) {
  inbox_->take(taken_);
  bool any = !taken_.empty();
  for (const Packet& packet : taken_) {
    if (std::shared_ptr<Link> link = open(packet.source_endpoint)) handler(link, packet);
  }
  std::array<epoll_event, kMaxEvents> events;
  const int ready = epoll_wait(epoll_, events.data(), kMaxEvents, 0);
  for (int index = 0; index < ready; ++index) {
    const epoll_event& event = events[static_cast<size_t>(index)];
    any = true;
    if (event.data.fd == listener_) {
      accept_links();
      continue;
    }
    const auto found = by_fd_.find(event.data.fd);
    if (found == by_fd_.end()) continue;
    const std::shared_ptr<Link> link = found->second;
    if ((event.events & EPOLLOUT) != 0) flush_link(*link);
    if ((event.events & (EPOLLIN | EPOLLHUP | EPOLLERR)) != 0 && !read_link(link, handler)) {
      drop(link);
      lost(link);
    }
  }
  bury_closed();
  for (const std::shared_ptr<Link>& link : std::exchange(closed_, {})) {
    any = true;
    lost(link);
  }
  return any;
}

void Wire::bury_closed() {
  for (auto next = in_process_.begin(); next != in_process_.end();) {
    const auto entry = next++;
    if (!entry->second->inbox->closed()) continue;
    entry->second->dead = true;
    closed_.push_back(entry->second);
    in_process_.erase(entry);
  }
}

}  // namespace softnic
