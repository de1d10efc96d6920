// SPDX-License-Identifier: MIT
#include "loopback.h"

#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <deque>
#include <optional>

#include "../../lib/env.h"
#include "adversary.h"
#include "connect.h"
#include "wire.h"

namespace mk::loopback {
namespace {

// Packets taken from one peer before the others have their turn.
constexpr int kPacketsPerTurn = 16;
// What the kernel may hold of a channel in one direction (it may grant less).
constexpr int kChannelBytes = 1 << 20;
constexpr int kFarewellMs = 1000;

struct Outgoing {
  Put put;
  uint32_t sent = 0;
};

struct Peer {
  FileDescriptor channel;
  std::deque<Outgoing> queue;  // puts not yet copied into the channel
  uint32_t incomplete = 0;     // posted, completion not yet reported
  bool left = false;           // it has said bye
  bool failed = false;
  bool was_reset = false;
  PacketHeader arriving{};     // the put whose pieces are arriving
  uint32_t arrived_bytes = 0;  // of it
  bool amid_put = false;
};

class Loopback : public Transport {
 public:
  Loopback(const TransportContext& context, std::vector<FileDescriptor> channels, uint64_t seed)
      : rank_(context.topology.rank),
        abort_(context.abort),
        regions_(context.regions),
        peers_(channels.size()) {
    for (size_t rank = 0; rank < channels.size(); ++rank) {
      peers_[rank].channel = std::move(channels[rank]);
      if (!peers_[rank].channel.valid()) continue;
      setsockopt(peers_[rank].channel.get(), SOL_SOCKET, SO_SNDBUF, &kChannelBytes, sizeof kChannelBytes);
    }
    if (seed != 0) adversary_.emplace(seed, rank_);
  }

  // The region table is all that the receiving end needs.
  Result<Bytes> add_region(uint32_t, std::byte*, size_t) override { return Bytes{}; }
  Status set_peer_keys(uint32_t, std::span<const Bytes>) override { return {}; }
  void remove_region(uint32_t) override {}

  bool post(const Put& put) override;
  void poll(TransportEvents& events) override;
  std::chrono::microseconds prepare_wait(std::vector<pollfd>& descriptors) override;
  void leave() override;

 private:
  void send_some(int rank);
  void receive_some(int rank, TransportEvents& events);
  bool receive_one(int rank, TransportEvents& events);
  Status check_piece(const Peer& peer, const PacketHeader& header, size_t payload_bytes) const;
  void deliver(int rank, const PacketHeader& header, std::span<const std::byte> payload,
               TransportEvents& events);
  Status place(const PacketHeader& header, uint64_t region_offset, std::span<const std::byte> bytes);
  void closed(int rank);
  void fail(int rank, mk_status_t code, const std::string& why);
  void report_completions(TransportEvents& events);
  short interest(const Peer& peer) const;

  const int rank_;
  AbortToken& abort_;
  RegionTable& regions_;
  std::vector<Peer> peers_;    // by rank
  std::vector<int> finished_;  // per put copied into a channel, its peer: completions to report
  std::vector<TransportEvents::Failure> failures_;
  std::optional<Adversary> adversary_;
  std::vector<pollfd> descriptors_;
  std::vector<int> ranks_;  // of descriptors_
  std::vector<std::byte> packet_ = std::vector<std::byte>(sizeof(PacketHeader) + kMaxPieceBytes);
};

bool Loopback::post(const Put& put) {
  Peer& peer = peers_[static_cast<size_t>(put.peer)];
  if (peer.failed) return true;
  if (!peer.channel.valid()) {
    fail(put.peer, MK_ERROR_REMOTE, "it has left");
    return true;
  }
  if (peer.incomplete >= kCreditsPerPeer) return false;
  ++peer.incomplete;
  peer.queue.push_back({put, 0});
  if (!adversary_) send_some(put.peer);
  return true;
}

void Loopback::send_some(int rank) {
  Peer& peer = peers_[static_cast<size_t>(rank)];
  while (!peer.queue.empty()) {
    // The adversary reads a source late, and so finds those that were overwritten too early.
    if (adversary_ && adversary_->coin()) return;
    Outgoing& front = peer.queue.front();
    const Put& put = front.put;
    const size_t part = std::min<size_t>(put.bytes - front.sent, kMaxPieceBytes);
    PacketHeader header{PacketKind::piece, put.signal, put.target_region, put.target_generation,
                        put.target_offset, put.bytes,  front.sent};
    iovec parts[2] = {{&header, sizeof header}, {const_cast<std::byte*>(put.source) + front.sent, part}};
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = part > 0 ? 2 : 1;
    const ssize_t sent = sendmsg(peer.channel.get(), &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0) {
      if (errno == EAGAIN || errno == EINTR || errno == ENOBUFS || errno == ENOMEM) return;
      // What it sent before it closed is still to be read; the end of the channel is noticed there.
      if (errno == EPIPE || errno == ECONNRESET) return;
      return fail(rank, MK_ERROR_NETWORK, format("sending failed: %s", std::strerror(errno)));
    }
    front.sent += static_cast<uint32_t>(part);
    if (front.sent < put.bytes) continue;
    peer.queue.pop_front();
    finished_.push_back(rank);
  }
}

Status Loopback::check_piece(const Peer& peer, const PacketHeader& header, size_t payload_bytes) const {
  const PacketHeader& first = peer.arriving;
  const uint32_t expected_offset = peer.amid_put ? peer.arrived_bytes : 0;
  const bool same_put =
      !peer.amid_put || (header.signal == first.signal && header.region == first.region &&
                         header.generation == first.generation && header.offset == first.offset &&
                         header.put_bytes == first.put_bytes);
  const bool fits = header.piece_offset == expected_offset && expected_offset <= header.put_bytes &&
                    payload_bytes <= header.put_bytes - expected_offset &&
                    (payload_bytes > 0 || header.put_bytes == 0);
  if (!same_put || !fits) return Status(MK_ERROR_NETWORK, "a piece does not continue the put before it");
  if (header.signal != kNoSignal && header.signal >= kNumSignals) {
    return Status(MK_ERROR_NETWORK, format("signal %u is outside [0, %u)", header.signal, kNumSignals));
  }
  // A command of kind signal names no region.
  if (header.put_bytes == 0 || peer.amid_put) return {};
  return regions_.check_put(header.region, header.generation, header.offset, header.put_bytes);
}

Status Loopback::place(const PacketHeader& header, uint64_t region_offset, std::span<const std::byte> bytes) {
  return regions_.place(header.region, header.generation, region_offset, bytes);
}

void Loopback::deliver(int rank, const PacketHeader& header, std::span<const std::byte> payload,
                       TransportEvents& events) {
  Peer& peer = peers_[static_cast<size_t>(rank)];
  peer.arriving = header;
  peer.arrived_bytes = header.piece_offset + static_cast<uint32_t>(payload.size());
  peer.amid_put = peer.arrived_bytes < header.put_bytes;
  if (adversary_) return adversary_->hold(rank, header, payload);
  if (!payload.empty()) {
    const Status status = place(header, header.offset + header.piece_offset, payload);
    if (!status.ok()) return fail(rank, status.code(), "a put of it is wrong: " + status.sentence());
  }
  if (!peer.amid_put && header.signal != kNoSignal) events.signals.push_back(header.signal);
}

// False when there is nothing more to read.
bool Loopback::receive_one(int rank, TransportEvents& events) {
  Peer& peer = peers_[static_cast<size_t>(rank)];
  const ssize_t got = recv(peer.channel.get(), packet_.data(), packet_.size(), MSG_DONTWAIT | MSG_TRUNC);
  if (got < 0) {
    if (errno == EAGAIN || errno == EINTR) return false;
    // The peer closed without reading all that was sent to it. Reported once; what it sent itself follows.
    if (errno == ECONNRESET && !peer.was_reset) return peer.was_reset = true;
    fail(rank, MK_ERROR_NETWORK, format("receiving failed: %s", std::strerror(errno)));
    return false;
  }
  if (got == 0) {
    closed(rank);
    return false;
  }
  const size_t bytes = static_cast<size_t>(got);
  PacketHeader header{};
  Status status;
  if (bytes < sizeof header || bytes > packet_.size()) {
    status = Status(MK_ERROR_NETWORK, format("a packet of %zu bytes", bytes));
  } else {
    std::memcpy(&header, packet_.data(), sizeof header);
    const size_t payload_bytes = bytes - sizeof header;
    if (header.kind == PacketKind::bye && payload_bytes == 0 && !peer.amid_put) {
      peer.left = true;
      return true;
    }
    status = header.kind == PacketKind::piece && !peer.left
                 ? check_piece(peer, header, payload_bytes)
                 : Status(MK_ERROR_NETWORK, format("an unexpected packet of kind %u and %zu bytes",
                                                   static_cast<unsigned>(header.kind), bytes));
  }
  if (!status.ok()) {
    fail(rank, status.code(), "it sent something wrong: " + status.sentence());
    return false;
  }
  deliver(rank, header, std::span(packet_).subspan(sizeof header, bytes - sizeof header), events);
  return !peer.failed;
}

void Loopback::receive_some(int rank, TransportEvents& events) {
  for (int n = 0; n < kPacketsPerTurn; ++n) {
    if (adversary_ && adversary_->full()) return;
    if (!receive_one(rank, events)) return;
  }
}

void Loopback::closed(int rank) {
  Peer& peer = peers_[static_cast<size_t>(rank)];
  if (peer.left && peer.queue.empty()) return peer.channel.reset();
  fail(rank, MK_ERROR_REMOTE,
       peer.left ? "it left while puts to it were under way" : "its end closed: the process died or gave up");
}

void Loopback::fail(int rank, mk_status_t code, const std::string& why) {
  Peer& peer = peers_[static_cast<size_t>(rank)];
  if (peer.failed) return;
  peer.failed = true;
  peer.channel.reset();
  peer.queue.clear();
  if (adversary_) adversary_->drop(rank);
  failures_.push_back(
      {rank, Status(code, format("rank %d: loopback channel to rank %d: %s", rank_, rank, why.c_str()))});
}

void Loopback::report_completions(TransportEvents& events) {
  size_t count = finished_.size();
  if (adversary_ && count > 0) {
    std::shuffle(finished_.begin(), finished_.end(), adversary_->random());
    count = adversary_->below(static_cast<uint32_t>(count) + 1);
  }
  for (size_t i = finished_.size() - count; i < finished_.size(); ++i) {
    --peers_[static_cast<size_t>(finished_[i])].incomplete;
  }
  finished_.resize(finished_.size() - count);
  events.completions += count;
}

short Loopback::interest(const Peer& peer) const {
  if (!peer.channel.valid()) return 0;
  const bool read = !adversary_ || !adversary_->full();
  return static_cast<short>((read ? POLLIN : 0) | (peer.queue.empty() ? 0 : POLLOUT));
}

void Loopback::poll(TransportEvents& events) {
  descriptors_.clear();
  ranks_.clear();
  for (size_t rank = 0; rank < peers_.size(); ++rank) {
    const short wanted = interest(peers_[rank]);
    if (wanted == 0) continue;
    descriptors_.push_back({peers_[rank].channel.get(), wanted, 0});
    ranks_.push_back(static_cast<int>(rank));
  }
  if (!descriptors_.empty() && ::poll(descriptors_.data(), descriptors_.size(), 0) > 0) {
    for (size_t i = 0; i < ranks_.size(); ++i) {
      const Peer& peer = peers_[static_cast<size_t>(ranks_[i])];
      if ((descriptors_[i].revents & (POLLIN | POLLHUP | POLLERR)) != 0) receive_some(ranks_[i], events);
      if ((descriptors_[i].revents & POLLOUT) != 0 && peer.channel.valid()) send_some(ranks_[i]);
    }
  }
  if (adversary_) {
    std::vector<Adversary::Failure> failures;
    const auto place_piece = [this](const PacketHeader& header, uint64_t offset,
                                    std::span<const std::byte> bytes) { return place(header, offset, bytes); };
    adversary_->step(place_piece, events.signals, failures);
    for (const auto& failure : failures) fail(failure.peer, failure.status.code(), failure.status.sentence());
  }
  report_completions(events);
  events.failures.insert(events.failures.end(), failures_.begin(), failures_.end());
  failures_.clear();
}

std::chrono::microseconds Loopback::prepare_wait(std::vector<pollfd>& descriptors) {
  for (const Peer& peer : peers_) {
    if (const short wanted = interest(peer); wanted != 0)
      descriptors.push_back({peer.channel.get(), wanted, 0});
  }
  if (adversary_ && (!adversary_->idle() || !finished_.empty())) {
    return std::chrono::microseconds(adversary_->below(200));
  }
  return finished_.empty() && failures_.empty() ? std::chrono::microseconds::max()
                                                : std::chrono::microseconds(0);
}

void Loopback::leave() {
  const Deadline deadline = Deadline::after(std::chrono::milliseconds(kFarewellMs));
  PacketHeader header{};
  header.kind = PacketKind::bye;
  for (Peer& peer : peers_) {
    if (!peer.channel.valid()) continue;
    while (send(peer.channel.get(), &header, sizeof header, MSG_DONTWAIT | MSG_NOSIGNAL) < 0 &&
           errno == EAGAIN) {
      pollfd writable{peer.channel.get(), POLLOUT, 0};
      if (deadline.passed() || abort_.raised() || ::poll(&writable, 1, std::min(deadline.left_ms(), 50)) < 0)
        break;
    }
  }
}

}  // namespace

Status available() { return {}; }

Result<std::unique_ptr<Transport>> create(const TransportContext& context, Deadline deadline) {
  const auto seed = env::integer("MK_LOOPBACK_SEED", 0, INT64_MAX);
  auto channels = connect_peers(context.topology, context.exchange, context.abort, seed.status(), deadline);
  if (!channels.ok()) return channels.status();
  return std::unique_ptr<Transport>(
      std::make_unique<Loopback>(context, channels.take(), static_cast<uint64_t>(seed.value())));
}

}  // namespace mk::loopback
