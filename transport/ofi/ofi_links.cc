// SPDX-License-Identifier: MIT
// How links begin and end. Peers greet each other before the first put, so that connections are made and both
// ends have proved that they took part in the exchange: the higher rank of a pair first, the lower answers.
#include <algorithm>

#include "../../lib/env.h"
#include "../agreement.h"
#include "ofi.h"
#include "ofi_transport.h"

namespace mk::ofi {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kFarewell{1000};
// Between two looks at a provider whose descriptor may not tell everything.
constexpr int kLookMs = 5;

}  // namespace

// Buffers for what this rank sends and receives. A peer has at most kMessagesPerPeer messages under way, and at
// its end one more.
Status OfiTransport::prepare_messages() {
  const auto num_peers = static_cast<size_t>(
      std::count_if(peers_.begin(), peers_.end(), [](const Peer& peer) { return peer.exists; }));
  if (num_peers == 0) return {};
  const size_t per_peer = kMessagesPerPeer + 1;
  messages_.resize(2 * num_peers * per_peer);
  operations_.resize(messages_.size() + num_peers * kWritesPerPeer);
  auto memory =
      fabric_->register_memory(messages_.data(), messages_.size() * sizeof(Message), FI_SEND | FI_RECV);
  if (!memory.ok()) return memory.status();
  messages_memory_ = memory.take();
  for (size_t n = 0; n < messages_.size(); ++n) operations_[n].message = &messages_[n];
  Operation* next = operations_.data();
  for (size_t n = 0; n < num_peers * per_peer; ++n) post_receive(*next++);
  for (size_t rank = 0; rank < peers_.size(); ++rank) {
    if (!peers_[rank].exists) continue;
    for (size_t n = 0; n < per_peer; ++n, ++next) {
      next->kind = Kind::message;
      next->peer = static_cast<int>(rank);
      peers_[rank].free_messages.push_back(next);
    }
  }
  for (size_t rank = 0; rank < peers_.size(); ++rank) {
    Peer& peer = peers_[rank];
    if (!peer.exists) continue;
    peer.puts.resize(kCreditsPerPeer);
    for (uint32_t n = 0; n < kCreditsPerPeer; ++n) peer.free_puts.push_back(n);
    for (size_t n = 0; n < kWritesPerPeer; ++n, ++next) {
      next->kind = Kind::write;
      next->peer = static_cast<int>(rank);
      peer.free_writes.push_back(next);
    }
  }
  return {};
}

void OfiTransport::post_receive(Operation& operation) {
  const iovec to{operation.message, sizeof(Message)};
  void* descriptor = fi_mr_desc(messages_memory_.get());
  fi_msg request{};
  request.msg_iov = &to;
  request.desc = &descriptor;
  request.iov_count = 1;
  request.addr = FI_ADDR_UNSPEC;
  request.context = &operation.context;
  const ssize_t result = fi_recvmsg(fabric_->endpoint(), &request, FI_COMPLETION);
  if (result != 0) fail_all("posting a receive failed: " + describe(library_, result));
}

Status OfiTransport::start(Deadline deadline) {
  {
    const std::lock_guard lock(mutex_);
    last_poll_ = Clock::now();
    for (Peer& peer : peers_) peer.silent_since = last_poll_;
    MK_RETURN_IF_ERROR(prepare_messages());
    for (int rank = 0; rank < rank_; ++rank) {
      peer_of(rank).owes = peer_of(rank).exists;
      peer_of(rank).owed = MessageKind::hello;
    }
  }
  return wait_for(&OfiTransport::all_greeted, deadline, "greeting");
}

bool OfiTransport::all_greeted() const {
  return std::all_of(peers_.begin(), peers_.end(),
                     [](const Peer& peer) { return !peer.exists || peer.greeted; });
}

bool OfiTransport::all_farewells_said() const {
  return std::all_of(peers_.begin(), peers_.end(), [](const Peer& peer) {
    return !peer.exists || peer.said_bye || peer.left || peer.failed;
  });
}

std::string OfiTransport::silent_ranks() const {
  std::string ranks;
  for (size_t rank = 0; rank < peers_.size(); ++rank) {
    if (peers_[rank].exists && !peers_[rank].greeted) ranks += format(" %zu", rank);
  }
  return ranks;
}

// Only while there is no proxy: before it begins and after it has ended.
Status OfiTransport::wait_for(bool (OfiTransport::*done)() const, Deadline deadline, const char* what) {
  for (;;) {
    const std::lock_guard lock(mutex_);
    progress();
    if ((this->*done)()) return {};
    if (!leaving_ && !events_.failures.empty()) return events_.failures.front().status;
    if (abort_.raised()) return abort_.reason();
    if (deadline.passed()) {
      return Status(MK_ERROR_TIMEOUT,
                    format("libfabric (%s), %s: nothing came from rank(s)%s by the deadline: a firewall, or an "
                           "interface that does not lead there (MK_SOCKET_IFNAME)",
                           fabric_->provider(), what, silent_ranks().c_str()));
    }
    pollfd descriptors[2] = {{fabric_->wait_descriptor(), POLLIN, 0}, {abort_.fd(), POLLIN, 0}};
    const int limit_ms = std::min(deadline.left_ms(), kLookMs);
    ::poll(descriptors, 2, fabric_->wait_descriptor() < 0 || fabric_->may_sleep() ? limit_ms : 0);
  }
}

void OfiTransport::leave() {
  {
    const std::lock_guard lock(mutex_);
    for (Peer& peer : peers_) {
      peer.owes = peer.exists && !peer.left && !peer.failed;
      peer.owed = MessageKind::bye;
    }
    events_ = {};
    leaving_ = true;
  }
  // Who does not take note of it finds out by itself.
  [[maybe_unused]] const Status status =
      wait_for(&OfiTransport::all_farewells_said, Deadline::after(kFarewell), "taking leave");
}

Status available() {
  auto library = load_library();
  if (!library.ok()) return library.status();
  return Fabric::probe(*library.value(), env::text("MK_OFI_PROVIDER"));
}

Result<std::unique_ptr<Transport>> create(const TransportContext& context, Deadline deadline) {
  auto library = load_library();
  if (!library.ok()) return library.status();
  return create_with(*library.value(), context, deadline, make_device_copies());
}

Result<std::unique_ptr<Transport>> create_with(const Library& library, const TransportContext& context,
                                               Deadline deadline, std::unique_ptr<DeviceCopies> copies) {
  const auto timeout = env::integer("MK_OFI_TIMEOUT_MS", 100, 86400000);
  auto opened = open_endpoint(library, context.topology, context.exchange, timeout.status(),
                              OfiTransport::operations(context.topology.nranks), deadline);
  if (!opened.ok()) return opened.status();
  auto transport = std::make_unique<OfiTransport>(library, context, opened.take(),
                                                  milliseconds(timeout.value()), std::move(copies));
  // Half of the time left, so that a failure can still be told to the others.
  const Status status = transport->start(Deadline::after(milliseconds(deadline.left_ms() / 2)));
  auto started = agree(status, {}, context.exchange, deadline, "greeting libfabric peers");
  if (!started.ok()) return started.status();
  return std::unique_ptr<Transport>(std::move(transport));
}

}  // namespace mk::ofi
