// SPDX-License-Identifier: MIT
// What the completion queue says: local completions, messages, errors; and what it does not say in time.
#include <cstring>

#include "ofi_transport.h"

namespace mk::ofi {
namespace {

// Taken in one poll.
constexpr int kReadsPerPoll = 8;
constexpr size_t kCompletionsPerRead = 32;
// A proxy that did not come by for so long cannot say that a peer was silent meanwhile.
constexpr std::chrono::seconds kOwnPause{1};

bool means_gone(int error) {
  switch (error) {
    case FI_ECONNRESET:
    case FI_ECONNREFUSED:
    case FI_ECONNABORTED:
    case FI_ENOTCONN:
    case FI_ESHUTDOWN:
    case EPIPE:
      return true;
    default:
      return false;
  }
}

bool may_have(MessageKind kind, uint32_t words) {
  switch (kind) {
    case MessageKind::signals:
      return words > 0;
    case MessageKind::landed:
      return words == kLandedWords;
    case MessageKind::placed:
      return words == 1;
    default:
      return words == 0;
  }
}

}  // namespace

void OfiTransport::progress() {
  blocked_ = false;
  for (int n = 0; n < kReadsPerPoll && take_completions(); ++n) {
  }
  for (size_t rank = 0; rank < peers_.size(); ++rank) {
    if (peers_[rank].exists && !peers_[rank].failed) advance(static_cast<int>(rank));
  }
  check_timeouts();
}

// False when there are no more.
bool OfiTransport::take_completions() {
  fi_cq_msg_entry entries[kCompletionsPerRead];
  const ssize_t count = fi_cq_read(fabric_->queue(), entries, kCompletionsPerRead);
  if (count == -FI_EAGAIN) return false;
  moved_ = true;
  if (count == -FI_EAVAIL) {
    take_error();
    return true;
  }
  if (count < 0) {
    fail_all("the completion queue failed: " + describe(library_, count));
    return false;
  }
  for (ssize_t n = 0; n < count; ++n) {
    // What a peer did by itself comes without a context of ours.
    if (entries[n].op_context == nullptr) continue;
    complete(*reinterpret_cast<Operation*>(entries[n].op_context), entries[n].len);
  }
  return count == static_cast<ssize_t>(kCompletionsPerRead);
}

void OfiTransport::take_error() {
  fi_cq_err_entry entry{};
  const ssize_t count = fi_cq_readerr(fabric_->queue(), &entry, 0);
  if (count == -FI_EAGAIN) return;
  if (count < 0) return fail_all("the completion queue failed: " + describe(library_, count));
  const std::string why = fabric_->describe_completion_error(entry);
  if (entry.op_context == nullptr) return fail_all("an operation of the provider failed: " + why);
  auto& operation = *reinterpret_cast<Operation*>(entry.op_context);
  if (operation.kind == Kind::receive) {
    // Too long a message is none of ours; a canceled receive was ended by ourselves.
    if (entry.err == FI_ETRUNC) return post_receive(operation);
    if (entry.err != FI_ECANCELED) fail_all("receiving failed: " + why);
    return;
  }
  const int rank = operation.peer;
  const char* what = operation.kind == Kind::write ? "a write" : "a message";
  release(operation);
  const Peer& peer = peer_of(rank);
  // A peer that has taken leave need not acknowledge our own farewell.
  if (peer.left && peer.credits == kCreditsPerPeer) return;
  if (means_gone(entry.err)) {
    return fail(rank, MK_ERROR_REMOTE,
                format("the connection broke (%s to it was under way): the process died or gave up: %s", what,
                       why.c_str()));
  }
  fail(rank, MK_ERROR_NETWORK, format("%s to it failed: %s", what, why.c_str()));
}

// Back to where it can be used again.
void OfiTransport::release(Operation& operation) {
  Peer& peer = peer_of(operation.peer);
  --peer.pending;
  (operation.kind == Kind::write ? peer.free_writes : peer.free_messages).push_back(&operation);
}

void OfiTransport::complete(Operation& operation, size_t received_bytes) {
  if (operation.kind == Kind::receive) {
    receive(*operation.message, received_bytes);
    return post_receive(operation);
  }
  release(operation);
  Peer& peer = peer_of(operation.peer);
  if (peer.failed) return;
  peer.silent_since = Clock::now();
  if (operation.kind == Kind::write && operation.stage != kNoStage) {
    stage_written(operation.peer, operation.stage);
  } else if (operation.kind == Kind::write) {
    OutgoingPut& outgoing = peer.puts[operation.put];
    --outgoing.pending;
    if (outgoing.pending == 0 && outgoing.posted == outgoing.put.bytes) bytes_in_place(peer, operation.put);
  } else if (operation.message->kind == MessageKind::answer) {
    peer.greeted = true;
  } else if (operation.message->kind == MessageKind::bye) {
    peer.said_bye = true;
  }
}

void OfiTransport::receive(const Message& message, size_t bytes) {
  // Anyone can send to an endpoint. Who does not know our token took no part in the exchange, and goes unheard.
  if (bytes < message_bytes(0) || bytes > sizeof message || message.magic != kMessageMagic ||
      message.token != token_ || message.sender >= peers_.size()) {
    return;
  }
  const int sender = message.sender;
  Peer& peer = peer_of(sender);
  if (!peer.exists || peer.failed) return;
  peer.silent_since = Clock::now();
  if (const Status status = accept(sender, message, bytes); !status.ok()) {
    fail(sender, status.code(), "it sent something wrong: " + status.sentence());
  }
}

Status OfiTransport::accept(int sender, const Message& message, size_t bytes) {
  Peer& peer = peer_of(sender);
  if (message.count > kWordsPerMessage || bytes != message_bytes(message.count) ||
      !may_have(message.kind, message.count)) {
    return Status(MK_ERROR_NETWORK, format("a message of kind %u with %zu bytes and %u words",
                                           static_cast<unsigned>(message.kind), bytes, message.count));
  }
  if (peer.left) return Status(MK_ERROR_NETWORK, "a message after its farewell");
  if (message.kind == MessageKind::landed) return accept_landed(sender, message);
  if (message.kind == MessageKind::placed) return accept_placed(sender, message);
  const bool has_signals = message.kind == MessageKind::signals;
  for (uint32_t n = 0; n < message.count; ++n) {
    if (message.words[n] >= kNumSignals) {
      return Status(MK_ERROR_NETWORK, format("signal %u is outside [0, %u)", message.words[n], kNumSignals));
    }
  }
  if (has_signals) {
    events_.signals.insert(events_.signals.end(), message.words, message.words + message.count);
  } else if (message.kind == MessageKind::hello && sender > rank_ && !peer.greeted && !peer.owes) {
    peer.owes = true;
    peer.owed = MessageKind::answer;
  } else if (message.kind == MessageKind::answer && sender < rank_ && !peer.greeted) {
    peer.greeted = true;
  } else if (message.kind == MessageKind::bye) {
    peer.left = true;
    if (peer.credits < kCreditsPerPeer)
      fail(sender, MK_ERROR_REMOTE, "it left while puts to it were under way");
  } else {
    return Status(MK_ERROR_NETWORK,
                  format("an unexpected message of kind %u", static_cast<unsigned>(message.kind)));
  }
  return {};
}

void OfiTransport::check_timeouts() {
  const auto now = Clock::now();
  const bool paused = now - last_poll_ > kOwnPause;
  last_poll_ = now;
  for (size_t rank = 0; rank < peers_.size(); ++rank) {
    Peer& peer = peers_[rank];
    if (!peer.exists || peer.failed) continue;
    const bool waits = peer.pending > 0 || peer.credits < kCreditsPerPeer || peer.owes;
    if (!waits || paused) {
      peer.silent_since = now;
    } else if (!peer.left && now - peer.silent_since > timeout_) {
      fail(static_cast<int>(rank), MK_ERROR_NETWORK,
           format("nothing was acknowledged for %lld ms (MK_OFI_TIMEOUT_MS; %u writes and messages under way, "
                  "%zu puts and %zu signals waiting): the path to it is blocked, or its process stands still",
                  static_cast<long long>(timeout_.count()), peer.pending, peer.to_write.size(),
                  peer.signals.size()));
    }
  }
}

void OfiTransport::fail(int rank, mk_status_t code, const std::string& why) {
  Peer& peer = peer_of(rank);
  if (peer.failed) return;
  peer.failed = true;
  peer.owes = false;
  peer.to_write.clear();
  peer.signals.clear();
  peer.notices.clear();
  events_.failures.push_back({rank, Status(code, format("rank %d: libfabric link (%s) to rank %d: %s", rank_,
                                                        fabric_->provider(), rank, why.c_str()))});
}

void OfiTransport::fail_all(const std::string& why) {
  for (size_t rank = 0; rank < peers_.size(); ++rank) {
    if (peers_[rank].exists && !peers_[rank].left) fail(static_cast<int>(rank), MK_ERROR_NETWORK, why);
  }
}

}  // namespace mk::ofi
