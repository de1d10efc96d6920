// SPDX-License-Identifier: MIT
#include "verbs_transport.h"

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>

#include "../../lib/env.h"
#include "../../lib/log.h"

namespace mk::verbs {
namespace {

constexpr size_t kRequestBatch = 16;
// Long runs of unsignaled requests would fill a send queue that nothing empties.
constexpr uint32_t kMostUnsignaled = 16;
constexpr int kCompletionBatch = 64;
constexpr int kFarewellMs = 300;
constexpr uint32_t kPollsPerEventCheck = 1024;
// A peer that owes acknowledgements and says nothing for so long is written to, to find out whether it is
// there.
constexpr std::chrono::milliseconds kProbeAfter{500};
// A write of srd without bytes of a put carries these to the peer's mailbox: EFA wants a buffer.
constexpr uint32_t kMailboxWriteBytes = 4;

}  // namespace

Sabotage& sabotage() {
  static Sabotage sabotage;
  return sabotage;
}

Result<SignalMode> signal_mode() {
  const std::string text = env::text("MK_IB_SIGNAL");
  if (text == "immediate") return SignalMode::immediate;
  if (text == "completion") return SignalMode::completion;
  return Status(
      MK_ERROR_INVALID_ARGUMENT,
      format("environment variable MK_IB_SIGNAL: expected immediate or completion, saw \"%s\"", text.c_str()));
}

VerbsTransport::VerbsTransport(const TransportContext& context, const char* name)
    : rank_(context.topology.rank),
      name_(name),
      abort_(context.abort),
      topology_(context.topology),
      peers_(static_cast<size_t>(context.topology.nranks)) {}

VerbsTransport::~VerbsTransport() {
  for (Peer& peer : peers_) {
    for (Link& link : peer.links) {
      if (link.address != nullptr) nics_[link.nic]->library.destroy_ah(link.address);
    }
  }
  for (Queue& queue : queues_) {
    if (queue.qp != nullptr) nics_[queue.nic]->library.destroy_qp(queue.qp);
  }
  for (ibv_mr* mr : scratch_mrs_) nics_.front()->library.deregister_mr(mr);
}

Result<Bytes> VerbsTransport::add_region(uint32_t region, std::byte* base, size_t bytes) {
  return registration_->add(region, base, bytes);
}

Status VerbsTransport::set_peer_keys(uint32_t region, std::span<const Bytes> keys) {
  return registration_->set_peer_keys(region, keys, peer_nics_);
}

void VerbsTransport::remove_region(uint32_t region) { registration_->remove(region); }

Link* VerbsTransport::link_of(const WorkId& id) {
  if (id.peer >= peers_.size() || id.link >= peers_[id.peer].links.size()) return nullptr;
  return &peers_[id.peer].links[id.link];
}

bool VerbsTransport::post(const Put& put) {
  Peer& peer = peers_[static_cast<size_t>(put.peer)];
  if (peer.failed) return true;
  if (peer.left) {
    fail(put.peer, MK_ERROR_REMOTE, "a put to it, after it left");
    return true;
  }
  if (put.bytes == 0 && put.signal == kNoSignal) {
    ++completions_;
    return true;
  }
  if (peer.free_slots == 0) return false;
  const uint32_t index = static_cast<uint32_t>(std::countr_zero(peer.free_slots));
  Slot& slot = peer.slots[index];
  slot = Slot{};
  slot.put = put;
  if (put.bytes > 0) {
    slot.source = registration_->find(put.source_region);
    slot.target = registration_->find(put.target_region);
    // Deregistered since the command was checked.
    if (!slot.source || !slot.target || slot.target->peers.empty() || put.source < slot.source->base ||
        put.source + put.bytes > slot.source->base + slot.source->bytes) {
      fail(put.peer, MK_ERROR_INTERNAL, "a put names a region that is not registered (any more)");
      return true;
    }
  }
  peer.free_slots &= ~(uint64_t{1} << index);
  slot.used = true;
  plan(put.peer, index);
  return true;
}

// Cuts the put in a slot into stripes and decides how its signal travels.
void VerbsTransport::plan(int rank, uint32_t slot_index) {
  Peer& peer = peers_[static_cast<size_t>(rank)];
  Slot& slot = peer.slots[slot_index];
  const Put& put = slot.put;
  const uint32_t num_links = static_cast<uint32_t>(peer.links.size());
  const uint32_t stripes = num_stripes(put.bytes, num_links);
  uint32_t most_pieces = 0;
  for (uint32_t n = 0; n < stripes; ++n) {
    Link& link = peer.links[(peer.next_link + n) % num_links];
    const Range range = stripe(put.target_offset, put.bytes, stripes, n);
    const uint64_t source_offset = put.bytes > 0 ? static_cast<uint64_t>(put.source - slot.source->base) : 0;
    const uint32_t pieces =
        count_pieces(source_offset, put.target_offset, range, nics_[link.nic]->most_bytes());
    slot.pieces += pieces;
    most_pieces = std::max(most_pieces, pieces);
    link.jobs.push_back({slot_index, range});
    ++slot.jobs;
    ++jobs_;
  }
  peer.next_link = (peer.next_link + stripes) % num_links;
  if (put.signal == kNoSignal) return;
  slot.acknowledged = false;
  ++peer.awaited;
  const bool countable = most_pieces <= kWindow && slot.pieces <= kMaxPieces;
  slot.immediates = put.bytes == 0 || (mode_ == SignalMode::immediate && countable);
  if (put.bytes == 0) slot.stage = Slot::Stage::signal;
  if (sabotage().early_free) {
    slot.complete = true;
    ++completions_;
  }
}

// Hands a link's jobs to its queue pair as far as there is room.
void VerbsTransport::pump(Link& link) {
  Peer& peer = peers_[static_cast<size_t>(link.peer)];
  Queue& queue = *link.queue;
  while (!link.jobs.empty() && !peer.failed) {
    requests_.clear();
    while (!link.jobs.empty() && requests_.size() < kRequestBatch) {
      Job& job = link.jobs.front();
      Slot& slot = peer.slots[job.slot];
      if (queue.sends + kControlSends >= queue.send_depth) break;
      if (slot.immediates && link.window_used >= kWindow) break;
      requests_.push_back(next_piece(link, job, slot));
      if (requests_.back().signaled) ++slot.outstanding;
      if (job.range.begin < job.range.end) continue;
      --slot.jobs;
      --jobs_;
      const uint32_t slot_index = job.slot;
      link.jobs.pop_front();
      if (sabotage().no_completion) advance(link.peer, slot_index);
    }
    if (requests_.empty()) return;
    if (const int error = post_requests(link, requests_); error != 0) {
      return fail(link.peer, MK_ERROR_NETWORK,
                  format("over %s: posting failed: %s", text_of_link(link).c_str(), std::strerror(error)));
    }
  }
}

// Every request of an unordered queue has a completion of its own; an ordered one's stands for those before it.
void VerbsTransport::mark_signaled(Queue& queue, WorkRequest& request, bool wanted) {
  ++queue.sends;
  request.signaled = wanted || unordered() || queue.unsignaled + 1 >= kMostUnsignaled;
  if (request.signaled) {
    request.id.count = std::exchange(queue.unsignaled, 0u) + 1;
  } else {
    ++queue.unsignaled;
  }
}

// A write without bytes of a put.
void VerbsTransport::fill_empty(const Link& link, WorkRequest& request) const {
  if (!unordered()) return;
  request.local = scratch_.data();
  request.lkey = scratch_mrs_[link.nic]->lkey;
  request.bytes = kMailboxWriteBytes;
  request.remote = link.mailbox;
  request.rkey = link.mailbox_rkey;
}

WorkRequest VerbsTransport::next_piece(Link& link, Job& job, Slot& slot) {
  const Put& put = slot.put;
  WorkRequest request;
  request.id = {WorkKind::data, static_cast<uint16_t>(link.peer), static_cast<uint8_t>(link.index),
                static_cast<uint8_t>(job.slot)};
  const uint64_t left = job.range.end - job.range.begin;
  if (left > 0) {
    const uint64_t source = static_cast<uint64_t>(put.source - slot.source->base) + job.range.begin;
    const uint64_t target = put.target_offset + job.range.begin;
    const RemoteRegion& remote = slot.target->peers[static_cast<size_t>(link.peer)];
    request.bytes = piece_bytes(source, target, left, nics_[link.nic]->most_bytes());
    request.local = slot.source->base + source;
    request.lkey = slot.source->lkeys[link.nic][source / kRegistrationBytes];
    request.remote = remote.base + target;
    const auto& rkeys = remote.rkeys[link.peer_nic];
    // set_peer_keys came from the peer: a list too short is answered by its NIC, as a wrong key.
    request.rkey = target / kRegistrationBytes < rkeys.size() ? rkeys[target / kRegistrationBytes] : 0;
    job.range.begin += request.bytes;
  }
  if (slot.immediates) {
    request.immediate =
        sabotage().forged_immediate.value_or(encode(PutImmediate{job.slot, put.signal, slot.pieces}));
    ++link.window_used;
    ++slot.posted_immediates[link.index];
  }
  if (request.bytes == 0) fill_empty(link, request);
  mark_signaled(*link.queue, request, job.range.begin == job.range.end);
  return request;
}

// Looks at what a slot's put needs next.
void VerbsTransport::advance(int rank, uint32_t slot_index) {
  Peer& peer = peers_[static_cast<size_t>(rank)];
  Slot& slot = peer.slots[slot_index];
  const bool idle = slot.jobs == 0 && (slot.outstanding == 0 || (sabotage().no_completion && !slot.complete));
  if (!idle) return;
  if (!slot.complete) {
    slot.complete = true;
    ++completions_;
  }
  if (!slot.acknowledged && slot.stage == Slot::Stage::data && !slot.immediates) {
    // All data is at the peer: now the signal, alone.
    slot.stage = Slot::Stage::signal;
    slot.immediates = true;
    slot.pieces = 1;
    Link& link = peer.links[slot_index % peer.links.size()];
    link.jobs.push_front({slot_index, {}});
    slot.jobs = 1;
    ++jobs_;
    return;
  }
  if (!slot.acknowledged && !sabotage().no_slots) return;
  if (slot.outstanding > 0) return;
  for (Link& link : peer.links) {
    link.window_used -= std::exchange(slot.posted_immediates[link.index], uint16_t{0});
  }
  slot.used = false;
  slot.source.reset();
  slot.target.reset();
  peer.free_slots |= uint64_t{1} << slot_index;
  credits_ = true;
}

Status VerbsTransport::post_receives(Queue& queue, uint32_t count) {
  std::array<ibv_recv_wr, 32> requests;
  ibv_sge buffer{reinterpret_cast<uint64_t>(scratch_.data()) + kScratchBytes, kScratchBytes,
                 scratch_mrs_[queue.nic]->lkey};
  while (count > 0) {
    const uint32_t batch = std::min<uint32_t>(count, requests.size());
    for (uint32_t i = 0; i < batch; ++i) {
      requests[i] = ibv_recv_wr{};
      requests[i].wr_id = encode(queue.receive_id);
      requests[i].next = i + 1 < batch ? &requests[i + 1] : nullptr;
      // Immediates bring no bytes; EFA wants a buffer all the same.
      if (unordered()) {
        requests[i].sg_list = &buffer;
        requests[i].num_sge = 1;
      }
    }
    ibv_recv_wr* bad = nullptr;
    if (const int error = ibv_post_recv(queue.qp, requests.data(), &bad); error != 0) {
      return system_error(*nics_[queue.nic], "post receives", error);
    }
    count -= batch;
  }
  return {};
}

void VerbsTransport::refill(Queue& queue) {
  if (queue.receives_missing < kReceiveBatch) return;
  const Status status = post_receives(queue, std::exchange(queue.receives_missing, 0u));
  if (status.ok()) return;
  for (const int rank : peers_on(queue.nic, queue.qp)) fail(rank, status.code(), status.sentence());
}

// A write without bytes of a put. False: no room.
bool VerbsTransport::send_empty(Link& link, std::optional<ControlImmediate> control, WorkKind kind) {
  Queue& queue = *link.queue;
  if (queue.sends >= queue.send_depth) return false;
  WorkRequest request;
  request.id = {kind, static_cast<uint16_t>(link.peer), static_cast<uint8_t>(link.index)};
  if (control) request.immediate = encode(*control);
  fill_empty(link, request);
  mark_signaled(queue, request, kind == WorkKind::bye);
  if (const int error = post_requests(link, {&request, 1}); error != 0) {
    fail(link.peer, MK_ERROR_NETWORK,
         format("over %s: posting failed: %s", text_of_link(link).c_str(), std::strerror(error)));
  }
  return true;
}

// Tells a peer which of its slots are free again; their receives have been posted again before. A message has
// room for eight: what waits for others is left unless `all` is to go.
void VerbsTransport::acknowledge_arrivals(Peer& peer, bool all) {
  for (uint32_t group = 0; group < 8 && peer.to_acknowledge != 0 && !peer.failed && !peer.left; ++group) {
    const uint32_t mask = static_cast<uint32_t>(peer.to_acknowledge >> (8 * group) & 0xff);
    if (mask == 0 || (mask != 0xff && !all)) continue;
    if (!send_empty(peer.links[peer.acknowledge_link], acknowledge(group, mask), WorkKind::control)) return;
    peer.to_acknowledge &= ~(uint64_t{mask} << (8 * group));
  }
}

void VerbsTransport::acknowledge_all() {
  for (Peer& peer : peers_) {
    if (peer.to_acknowledge != 0) acknowledge_arrivals(peer, true);
  }
}

void VerbsTransport::poll(TransportEvents& events) {
  std::array<ibv_wc, kCompletionBatch> completions;
  for (size_t nic = 0; nic < nics_.size(); ++nic) {
    for (const ibv_wc& completion : stash_[nic]) handle(nic, completion, events);
    stash_[nic].clear();
    const int count = nics_[nic]->poll(completions.data(), kCompletionBatch);
    for (int i = 0; i < count; ++i) handle(nic, completions[static_cast<size_t>(i)], events);
    if (count < 0) {
      for (const int rank : peers_on(nic, nullptr)) {
        fail(rank, MK_ERROR_NETWORK, nics_[nic]->text() + ": its completion queue cannot be read any more");
      }
    }
    if (suspicions_ > 0 || polls_ % kPollsPerEventCheck == 0) check_async_events(nic);
  }
  ++polls_;
  for (Queue& queue : queues_) refill(queue);
  for (Peer& peer : peers_) {
    if (peer.to_acknowledge != 0) {
      acknowledge_arrivals(peer, std::chrono::steady_clock::now() >= peer.acknowledge_by);
    }
    if (jobs_ == 0 || peer.failed) continue;
    for (Link& link : peer.links) pump(link);
  }
  if (suspicions_ > 0) decide_suspicions();
  events.completions += std::exchange(completions_, 0u);
  if (std::exchange(credits_, false)) events.credits = true;
  events.failures.insert(events.failures.end(), failures_.begin(), failures_.end());
  failures_.clear();
}

// A peer that has died after the last byte reached it would not be missed: nothing is under way to it.
std::chrono::microseconds VerbsTransport::probe_silent_peers() {
  auto limit = std::chrono::microseconds::max();
  for (Peer& peer : peers_) {
    if (peer.awaited == 0 || peer.failed || peer.left) continue;
    const auto now = std::chrono::steady_clock::now();
    if (!std::exchange(peer.heard, false) && now >= peer.probe_at) {
      send_empty(peer.links[polls_ % peer.links.size()], {}, WorkKind::control);
    } else if (now < peer.probe_at) {
      limit = std::min(limit, std::chrono::ceil<std::chrono::microseconds>(peer.probe_at - now));
      continue;
    }
    peer.probe_at = now + kProbeAfter;
    limit = std::min<std::chrono::microseconds>(limit, kProbeAfter);
  }
  return limit;
}

std::chrono::microseconds VerbsTransport::prepare_wait(std::vector<pollfd>& descriptors) {
  acknowledge_all();
  const auto limit = probe_silent_peers();
  bool found = completions_ > 0;
  for (size_t nic = 0; nic < nics_.size(); ++nic) {
    check_async_events(nic);
    // What arrives after this wakes the sleeper; what came before is taken here.
    nics_[nic]->arm();
    std::array<ibv_wc, 16> completions;
    const int count = nics_[nic]->poll(completions.data(), 16);
    if (count > 0) stash_[nic].insert(stash_[nic].end(), completions.begin(), completions.begin() + count);
    found = found || !stash_[nic].empty();
    descriptors.push_back({nics_[nic]->channel_fd(), POLLIN, 0});
    descriptors.push_back({nics_[nic]->context->async_fd, POLLIN, 0});
  }
  if (found || !failures_.empty()) return std::chrono::microseconds(0);
  return suspicions_ > 0 ? std::chrono::microseconds(1000) : limit;
}

// Says bye to every peer and waits until each has got it, has said it too, or cannot be reached.
void VerbsTransport::leave() {
  const Deadline deadline = Deadline::after(std::chrono::milliseconds(kFarewellMs));
  TransportEvents events;
  acknowledge_all();
  std::vector<bool> said(peers_.size(), false);
  for (;;) {
    poll(events);
    bool waiting = false;
    for (size_t rank = 0; rank < peers_.size(); ++rank) {
      Peer& peer = peers_[rank];
      if (peer.links.empty() || peer.left || peer.failed || peer.bye_sent) continue;
      if (!said[rank])
        said[rank] = send_empty(peer.links[0], ControlImmediate{ControlKind::bye, 0}, WorkKind::bye);
      waiting = true;
    }
    if (!waiting || deadline.passed() || abort_.raised()) return;
    std::vector<pollfd> descriptors;
    const auto limit = prepare_wait(descriptors);
    if (limit.count() > 0) ::poll(descriptors.data(), descriptors.size(), std::min(deadline.left_ms(), 5));
  }
}

}  // namespace mk::verbs
