// SPDX-License-Identifier: MIT
// The sending half, regions, and the wait. What arrives and completes is in ofi_completions.cc, the beginning
// and the end of links in ofi_links.cc.
#include "ofi_transport.h"

#include <algorithm>
#include <cstring>

namespace mk::ofi {
namespace {

using std::chrono::microseconds;

// Bytes of one remote write. Pieces bound how long a link that works may be silent.
constexpr size_t kPieceBytes = 1 << 20;
// A provider's connections and timers may need a look without any descriptor becoming ready.
constexpr microseconds kLongestSleep{50000};
// The same where the provider refused something for now, or has no descriptor.
constexpr microseconds kRetrySleep{500};
// Where the provider says that there is something and there is not.
constexpr microseconds kDoubtSleep{100};

}  // namespace

size_t OfiTransport::operations(int nranks) {
  return static_cast<size_t>(nranks) * (kWritesPerPeer + 2 * (kMessagesPerPeer + 1));
}

OfiTransport::OfiTransport(const Library& library, const TransportContext& context, Opened opened,
                           std::chrono::milliseconds timeout, std::unique_ptr<DeviceCopies> copies)
    : library_(library),
      rank_(context.topology.rank),
      abort_(context.abort),
      region_table_(context.regions),
      timeout_(timeout),
      token_(opened.token),
      fabric_(std::move(opened.fabric)),
      copies_(std::move(copies)),
      peers_(opened.peers.size()),
      largest_piece_(std::min(kPieceBytes, fabric_->largest_write())) {
  for (size_t rank = 0; rank < peers_.size(); ++rank) {
    peers_[rank].address = opened.peers[rank];
    peers_[rank].exists = !context.topology.same_node(static_cast<int>(rank), rank_);
  }
}

OfiTransport::~OfiTransport() {
  // Regions first: from here on no peer writes to them. The endpoint before the buffers that it still holds.
  regions_.clear();
  fabric_->close_endpoint();
  messages_memory_.reset();
  staging_memory_.reset();
}

Result<Bytes> OfiTransport::add_region(uint32_t region, std::byte* base, size_t bytes) {
  const std::lock_guard lock(mutex_);
  if (regions_.size() <= region) regions_.resize(region + 1);
  RegionKey key{};
  const bool on_device = copies_ && bytes > 0 && copies_->owns(base);
  regions_[region].on_device = on_device;
  regions_[region].base = base;
  if (on_device) {
    MK_RETURN_IF_ERROR(open_staging());
    std::byte* landing = staging_ + staging_half();
    key = {fi_mr_key(staging_memory_.get()),
           fabric_->virtual_addresses() ? reinterpret_cast<uint64_t>(landing) : staging_half(), 1};
  } else if (bytes > 0) {
    auto memory = fabric_->register_memory(base, bytes, FI_WRITE | FI_REMOTE_WRITE);
    if (!memory.ok()) return memory.status();
    key.key = fi_mr_key(memory.value().get());
    key.base = fabric_->virtual_addresses() ? reinterpret_cast<uint64_t>(base) : 0;
    regions_[region].memory = memory.take();
  }
  const auto* begin = reinterpret_cast<const std::byte*>(&key);
  return Bytes(begin, begin + sizeof key);
}

Status OfiTransport::set_peer_keys(uint32_t region, std::span<const Bytes> keys) {
  const std::lock_guard lock(mutex_);
  std::vector<RegionKey> all(keys.size());
  for (size_t rank = 0; rank < keys.size(); ++rank) {
    if (keys[rank].size() != sizeof(RegionKey)) {
      return Status(MK_ERROR_NETWORK, format("ofi: rank %zu sent a region key of %zu bytes, expected %zu", rank,
                                             keys[rank].size(), sizeof(RegionKey)));
    }
    std::memcpy(&all[rank], keys[rank].data(), sizeof(RegionKey));
  }
  regions_[region].keys = std::move(all);
  return {};
}

void OfiTransport::remove_region(uint32_t region) {
  const std::lock_guard lock(mutex_);
  if (region >= regions_.size()) return;
  if (regions_[region].on_device) wait_for_landings(region);
  regions_[region] = LocalRegion{};
}

bool OfiTransport::post(const Put& put) {
  const std::lock_guard lock(mutex_);
  Peer& peer = peer_of(put.peer);
  if (peer.failed) return true;
  if (peer.left) {
    fail(put.peer, MK_ERROR_REMOTE, "it has left");
    return true;
  }
  if (peer.credits == 0) return false;
  --peer.credits;
  const uint32_t number = peer.free_puts.back();
  peer.free_puts.pop_back();
  peer.puts[number] = {put, 0, 0};
  if (put.bytes > 0) {
    peer.to_write.push_back(number);
  } else {
    bytes_in_place(peer, number);
  }
  advance(put.peer);
  return true;
}

// Gives the provider what it takes of what waits for this peer.
void OfiTransport::advance(int rank) {
  Peer& peer = peer_of(rank);
  if (peer.owes && !peer.failed && send(rank, peer.owed, {})) peer.owes = false;
  while (!peer.to_write.empty()) {
    const uint32_t number = peer.to_write.front();
    if (!(is_staged(peer.puts[number].put, rank) ? stage_pieces(rank, number) : write(rank, number))) break;
    peer.to_write.pop_front();
  }
  if (copies_) {
    advance_stages(rank);
    advance_landings(rank);
  }
  // One message is kept back for the farewell.
  while (!peer.notices.empty() && peer.free_messages.size() > 1) {
    if (!send(rank, peer.notices.front().kind, peer.notices.front().words)) break;
    peer.notices.pop_front();
  }
  while (!peer.signals.empty() && peer.free_messages.size() > 1) {
    const size_t waiting = peer.signals.size();
    send_signals(rank);
    if (peer.signals.size() == waiting) break;
  }
}

void OfiTransport::send_signals(int rank) {
  Peer& peer = peer_of(rank);
  uint32_t words[kWordsPerMessage];
  const size_t count = std::min<size_t>(peer.signals.size(), kWordsPerMessage);
  std::copy_n(peer.signals.begin(), count, words);
  if (!send(rank, MessageKind::signals, std::span(words, count))) return;
  peer.signals.erase(peer.signals.begin(), peer.signals.begin() + static_cast<ptrdiff_t>(count));
  peer.credits += static_cast<uint32_t>(count);
  events_.credits = true;
}

// Whether all bytes of the put have been posted.
bool OfiTransport::write(int rank, uint32_t number) {
  Peer& peer = peer_of(rank);
  OutgoingPut& outgoing = peer.puts[number];
  while (outgoing.posted < outgoing.put.bytes) {
    if (peer.free_writes.empty() || !write_piece(rank, number, *peer.free_writes.back())) return false;
    peer.free_writes.pop_back();
    ++outgoing.pending;
    ++peer.pending;
    outgoing.posted +=
        static_cast<uint32_t>(std::min<size_t>(outgoing.put.bytes - outgoing.posted, largest_piece_));
  }
  return true;
}

bool OfiTransport::write_piece(int rank, uint32_t number, Operation& operation) {
  Peer& peer = peer_of(rank);
  const OutgoingPut& outgoing = peer.puts[number];
  const Put& put = outgoing.put;
  const LocalRegion* source = put.source_region < regions_.size() ? &regions_[put.source_region] : nullptr;
  const LocalRegion* target = put.target_region < regions_.size() ? &regions_[put.target_region] : nullptr;
  if (source == nullptr || target == nullptr || !source->memory || target->keys.empty()) {
    fail(rank, MK_ERROR_INTERNAL,
         format("a put from region %u to region %u was under way when one of them was deregistered",
                put.source_region, put.target_region));
    return false;
  }
  const size_t bytes = std::min<size_t>(put.bytes - outgoing.posted, largest_piece_);
  const RegionKey& key = target->keys[static_cast<size_t>(rank)];
  operation.put = number;
  operation.stage = kNoStage;
  return post_write(rank, put.source + outgoing.posted, source->memory.get(),
                    {key.base + put.target_offset + outgoing.posted, bytes, key.key}, operation) == 0;
}

// Not yet accounted for.
ssize_t OfiTransport::post_write(int rank, const std::byte* source, fid_mr* memory, const fi_rma_iov& to,
                                 Operation& operation) {
  const iovec from{const_cast<std::byte*>(source), to.len};
  void* descriptor = fi_mr_desc(memory);
  fi_msg_rma request{};
  request.msg_iov = &from;
  request.desc = &descriptor;
  request.iov_count = 1;
  request.addr = peer_of(rank).address.address;
  request.rma_iov = &to;
  request.rma_iov_count = 1;
  request.context = &operation.context;
  const ssize_t result = fi_writemsg(fabric_->endpoint(), &request, FI_DELIVERY_COMPLETE | FI_COMPLETION);
  if (result == -FI_EAGAIN) {
    blocked_ = true;
  } else if (result != 0) {
    fail(rank, MK_ERROR_NETWORK, "writing failed: " + describe(library_, result));
  }
  return result;
}

bool OfiTransport::send(int rank, MessageKind kind, std::span<const uint32_t> words) {
  Peer& peer = peer_of(rank);
  if (peer.free_messages.empty()) return false;
  Operation& operation = *peer.free_messages.back();
  Message& message = *operation.message;
  message.magic = kMessageMagic;
  message.kind = kind;
  message.sender = static_cast<uint16_t>(rank_);
  message.token = peer.address.token;
  message.count = static_cast<uint32_t>(words.size());
  std::copy(words.begin(), words.end(), message.words);
  const iovec from{&message, message_bytes(message.count)};
  void* descriptor = fi_mr_desc(messages_memory_.get());
  fi_msg request{};
  request.msg_iov = &from;
  request.desc = &descriptor;
  request.iov_count = 1;
  request.addr = peer.address.address;
  request.context = &operation.context;
  const ssize_t result = fi_sendmsg(fabric_->endpoint(), &request, FI_DELIVERY_COMPLETE | FI_COMPLETION);
  if (result == -FI_EAGAIN) {
    blocked_ = true;
    return false;
  }
  if (result != 0) {
    fail(rank, MK_ERROR_NETWORK, "sending failed: " + describe(library_, result));
    return false;
  }
  peer.free_messages.pop_back();
  ++peer.pending;
  return true;
}

// The source is free, and the signal may follow. A put that carries one keeps its credit until it has left.
void OfiTransport::bytes_in_place(Peer& peer, uint32_t number) {
  ++events_.completions;
  const uint32_t signal = peer.puts[number].put.signal;
  peer.free_puts.push_back(number);
  if (signal == kNoSignal) {
    ++peer.credits;
    events_.credits = true;
  } else {
    peer.signals.push_back(signal);
  }
}

bool OfiTransport::unreported() const {
  return events_.completions > 0 || events_.credits || !events_.signals.empty() || !events_.failures.empty();
}

void OfiTransport::poll(TransportEvents& events) {
  const std::lock_guard lock(mutex_);
  progress();
  events.completions += events_.completions;
  events.credits = events.credits || events_.credits;
  events.signals.insert(events.signals.end(), events_.signals.begin(), events_.signals.end());
  events.failures.insert(events.failures.end(), events_.failures.begin(), events_.failures.end());
  events_.completions = 0;
  events_.credits = false;
  events_.signals.clear();
  events_.failures.clear();
}

microseconds OfiTransport::prepare_wait(std::vector<pollfd>& descriptors) {
  const std::lock_guard lock(mutex_);
  const bool moved = moved_;
  moved_ = false;
  if (unreported()) return microseconds(0);
  if (copies_ && copies_under_way()) return kDoubtSleep;
  const int descriptor = fabric_->wait_descriptor();
  if (descriptor < 0) return kRetrySleep;
  if (!fabric_->may_sleep()) return moved ? microseconds(0) : kDoubtSleep;
  descriptors.push_back({descriptor, POLLIN, 0});
  return blocked_ ? kRetrySleep : kLongestSleep;
}

}  // namespace mk::ofi
