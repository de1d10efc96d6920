// SPDX-License-Identifier: MIT
// What a transport's completion queues and event channels say, and what becomes of a link that fails.
#include <endian.h>

#include <algorithm>

#include "../../lib/log.h"
#include "verbs_transport.h"

namespace mk::verbs {
namespace {

// How sure the sign of a failure is of the reason; a surer one replaces the words of another.
constexpr int kFlushed = 1;
constexpr int kCompletedWithError = 2;
constexpr int kEvent = 3;
// Flushed requests only say that something happened before: wait for what it was.
constexpr std::chrono::milliseconds kFlushDelay{50};
constexpr std::chrono::milliseconds kErrorDelay{2};
// So long a slot may wait for others to be acknowledged with it: little beside what a window of puts takes.
constexpr std::chrono::microseconds kAcknowledgeAfter{20};

// What usually causes it, and what to do.
const char* hint(ibv_wc_status status) {
  switch (status) {
    case IBV_WC_RETRY_EXC_ERR:
    case IBV_WC_RESP_TIMEOUT_ERR:
      return "the peer did not answer within the retry time (MK_IB_TIMEOUT, MK_IB_RETRY): it died, its port "
             "went "
             "down, or the path is blocked (GID, VLAN, firewall)";
    case IBV_WC_RNR_RETRY_EXC_ERR:
      return "the peer does not receive";
    case IBV_WC_REM_ACCESS_ERR:
      return "the target is not registered (any more) there, or the put goes beyond it";
    case IBV_WC_REM_INV_REQ_ERR:
    case IBV_WC_REM_INV_RD_REQ_ERR:
      return "the peer's queue pair does not take the request: it is gone, or not set up";
    case IBV_WC_REM_OP_ERR:
    case IBV_WC_REM_ABORT_ERR:
      return "the peer's NIC could not carry it out";
    case IBV_WC_LOC_PROT_ERR:
      return "the source is not registered (any more) here";
    case IBV_WC_WR_FLUSH_ERR:
      return "the queue pair had failed before: usually the peer wrote to memory that is not registered (any "
             "more) "
             "here, or went away";
    case IBV_WC_GENERAL_ERR:
      return "the peer's memory is not registered (any more), or its NIC refuses the request";
    default:
      return "a defect of the NIC, its driver or this library";
  }
}

// Failures after which no put is taken any more, since the other end is not there.
bool is_unreachable(ibv_wc_status status) {
  return status == IBV_WC_RETRY_EXC_ERR || status == IBV_WC_RESP_TIMEOUT_ERR;
}

}  // namespace

std::string VerbsTransport::text_of_link(const Link& link) const {
  const Nic& nic = *nics_[link.nic];
  const NicCard& other = cards_[static_cast<size_t>(link.peer)][link.peer_nic];
  std::string text = format("%s, %s %s, QP %u to QP %u of %s at %s", nic.text().c_str(), name_of(nic.gid.kind),
                            text_of(nic.gid.gid).c_str(), link.queue->qp->qp_num, link.remote_qpn,
                            other.text.c_str(), text_of(other.gid).c_str());
  if (link.completed == 0) return text + " (nothing completed on it yet)";
  const auto ago = std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now() -
                                                                         link.last_completed);
  return text + format(" (%llu writes completed on it, the last %lld ms ago)",
                       static_cast<unsigned long long>(link.completed), static_cast<long long>(ago.count()));
}

bool VerbsTransport::has_puts_under_way(const Peer& peer) const {
  for (const Slot& slot : peer.slots) {
    if (slot.used && !slot.complete) return true;
  }
  return false;
}

void VerbsTransport::handle(size_t nic, const ibv_wc& completion, TransportEvents& events) {
  if (completion.status != IBV_WC_SUCCESS) return handle_error(nic, completion);
  if (completion.opcode != IBV_WC_RECV_RDMA_WITH_IMM) {
    const WorkId id = decode_work(completion.wr_id);
    if (Link* link = link_of(id); link != nullptr) handle_send(*link, id);
    return;
  }
  Link* link = link_of_receive(nic, completion);
  if (link == nullptr) {
    // No peer's: nothing is lost, but its receive is to be posted again.
    log(MK_LOG_WARN, "rank %d: %s received an immediate from QP %u, which is no peer's", rank_, name_,
        completion.src_qp);
    for (Queue& queue : queues_) {
      if (queue.qp->qp_num == completion.qp_num && queue.nic == nic) ++queue.receives_missing;
    }
    return;
  }
  ++link->queue->receives_missing;
  if (!peers_[static_cast<size_t>(link->peer)].failed) {
    handle_immediate(*link, be32toh(completion.imm_data), events);
  }
}

void VerbsTransport::handle_send(Link& link, const WorkId& id) {
  Peer& peer = peers_[static_cast<size_t>(link.peer)];
  link.queue->sends -= std::min(link.queue->sends, id.count);
  if (id.kind == WorkKind::bye) peer.bye_sent = true;
  if (id.kind != WorkKind::data || peer.failed) return;
  Slot& slot = peer.slots[id.slot % kCreditsPerPeer];
  ++link.completed;
  link.last_completed = std::chrono::steady_clock::now();
  if (!slot.used || slot.outstanding == 0) return;
  --slot.outstanding;
  advance(link.peer, id.slot % kCreditsPerPeer);
}

void VerbsTransport::handle_immediate(Link& link, uint32_t immediate, TransportEvents& events) {
  peers_[static_cast<size_t>(link.peer)].heard = true;
  const Status status = is_control(immediate) ? handle_control(link, decode_control(immediate))
                                              : handle_put(link, immediate, events);
  if (status.ok()) return;
  fail(link.peer, status.code(),
       format("over %s: it sent something wrong: %s", text_of_link(link).c_str(), status.sentence().c_str()));
}

Status VerbsTransport::handle_put(Link& link, uint32_t immediate, TransportEvents& events) {
  Peer& peer = peers_[static_cast<size_t>(link.peer)];
  if (peer.left) return Status(MK_ERROR_NETWORK, "a put after its bye");
  const PutImmediate put = decode_put(immediate);
  auto last = peer.arrivals.count(put);
  if (!last.ok()) return last.status();
  if (sabotage().no_count ? peer.arrivals.was_first(put) : last.value()) events.signals.push_back(put.signal);
  if (!last.value()) return {};
  const uint64_t bit = uint64_t{1} << put.slot;
  if ((peer.to_acknowledge & bit) != 0) {
    return Status(MK_ERROR_NETWORK, format("slot %u is used again before its acknowledgement", put.slot));
  }
  if (peer.to_acknowledge == 0) peer.acknowledge_by = std::chrono::steady_clock::now() + kAcknowledgeAfter;
  peer.to_acknowledge |= bit;
  peer.acknowledge_link = link.index;
  return {};
}

Status VerbsTransport::handle_control(Link& link, const ControlImmediate& control) {
  Peer& peer = peers_[static_cast<size_t>(link.peer)];
  switch (control.kind) {
    case ControlKind::acknowledge: {
      const uint64_t slots = acknowledged_slots(control);
      for (uint32_t index = 0; index < kCreditsPerPeer; ++index) {
        if ((slots >> index & 1) == 0) continue;
        Slot& slot = peer.slots[index];
        if (sabotage().no_slots) continue;
        if (!slot.used || slot.acknowledged || !slot.immediates || slot.jobs > 0) {
          return Status(MK_ERROR_NETWORK, format("it acknowledges slot %u, which awaits nothing", index));
        }
        slot.acknowledged = true;
        --peer.awaited;
        advance(link.peer, index);
      }
      return slots != 0 ? Status() : Status(MK_ERROR_NETWORK, "it acknowledges nothing");
    }
    case ControlKind::bye:
      peer.left = true;
      if (has_puts_under_way(peer)) fail(link.peer, MK_ERROR_REMOTE, "it left while puts to it were under way");
      return {};
    case ControlKind::refused:
      fail(
          link.peer, MK_ERROR_NETWORK,
          format("over %s: its puts are refused here: it wrote to memory that is not registered (any more), or "
                 "beyond it",
                 text_of_link(link).c_str()));
      return {};
  }
  return Status(MK_ERROR_NETWORK, format("a control message of kind %u", static_cast<unsigned>(control.kind)));
}

void VerbsTransport::handle_error(size_t nic, const ibv_wc& completion) {
  const WorkId id = decode_work(completion.wr_id);
  const bool receive = id.kind == WorkKind::receive;
  std::vector<int> ranks;
  Link* link = unordered() && receive ? nullptr : link_of(id);
  if (link != nullptr) {
    ranks.push_back(link->peer);
  } else {
    ranks = peers_on(nic, nullptr);
  }
  for (const int rank : ranks) {
    Link& one = link != nullptr ? *link : peers_[static_cast<size_t>(rank)].links.front();
    if (!receive && link != nullptr && unordered()) {
      one.queue->sends -= std::min<uint32_t>(one.queue->sends, 1);
    }
    suspect(
        rank, completion.status == IBV_WC_WR_FLUSH_ERR ? kFlushed : kCompletedWithError,
        Status(is_unreachable(completion.status) ? MK_ERROR_REMOTE : MK_ERROR_NETWORK,
               format("over %s: %s (status %d, vendor error %u): %s", text_of_link(one).c_str(),
                      nics_[nic]->library.wc_status_str(completion.status), static_cast<int>(completion.status),
                      completion.vendor_err, hint(completion.status))));
  }
  const bool refused = completion.status == IBV_WC_REM_ACCESS_ERR || completion.status == IBV_WC_GENERAL_ERR;
  // An unordered queue survives: its other end hears why. An ordered one tells it by its own state.
  if (unordered() && link != nullptr && !receive && refused &&
      !peers_[static_cast<size_t>(link->peer)].failed) {
    send_empty(*link, ControlImmediate{ControlKind::refused, 0}, WorkKind::control);
  }
}

std::vector<int> VerbsTransport::peers_on(size_t nic, const ibv_qp* qp) const {
  std::vector<int> ranks;
  for (size_t rank = 0; rank < peers_.size(); ++rank) {
    for (const Link& link : peers_[rank].links) {
      if (link.nic != nic || (qp != nullptr && link.queue->qp != qp)) continue;
      ranks.push_back(static_cast<int>(rank));
      break;
    }
  }
  return ranks;
}

void VerbsTransport::check_async_events(size_t nic) {
  const Library& library = nics_[nic]->library;
  ibv_async_event event;
  while (library.get_async_event(nics_[nic]->context, &event) == 0) {
    const char* text = library.event_type_str(event.event_type);
    std::vector<int> ranks;
    switch (event.event_type) {
      case IBV_EVENT_DEVICE_FATAL:
      case IBV_EVENT_CQ_ERR:
        ranks = peers_on(nic, nullptr);
        break;
      case IBV_EVENT_QP_FATAL:
      case IBV_EVENT_QP_REQ_ERR:
      case IBV_EVENT_QP_ACCESS_ERR:
        ranks = peers_on(nic, event.element.qp);
        break;
      case IBV_EVENT_PORT_ERR:
        log(MK_LOG_WARN, "rank %d: %s: %s: puts over it wait until it is back or the retry time ends", rank_,
            nics_[nic]->text().c_str(), text);
        break;
      default:
        log(MK_LOG_INFO, "rank %d: %s: %s", rank_, nics_[nic]->text().c_str(), text);
    }
    const bool access = event.event_type == IBV_EVENT_QP_ACCESS_ERR;
    for (const int rank : ranks) {
      suspect(rank, kEvent,
              Status(MK_ERROR_NETWORK,
                     format("%s: %s%s", nics_[nic]->text().c_str(), text,
                            access ? ": it wrote to memory that is not registered (any more) here, or beyond it"
                                   : "")));
    }
    library.ack_async_event(&event);
  }
}

void VerbsTransport::suspect(int rank, int certainty, Status status) {
  Peer& peer = peers_[static_cast<size_t>(rank)];
  if (peer.failed) return;
  const auto now = std::chrono::steady_clock::now();
  const auto decide_at = now + (certainty == kFlushed ? kFlushDelay : kErrorDelay);
  if (!peer.suspicion) {
    ++suspicions_;
    peer.suspicion = Suspicion{std::move(status), certainty, decide_at};
  } else if (certainty > peer.suspicion->certainty) {
    peer.suspicion->status = std::move(status);
    peer.suspicion->certainty = certainty;
    peer.suspicion->decide_at = std::min(peer.suspicion->decide_at, decide_at);
  }
}

void VerbsTransport::decide_suspicions() {
  const auto now = std::chrono::steady_clock::now();
  for (size_t rank = 0; rank < peers_.size(); ++rank) {
    Peer& peer = peers_[rank];
    if (!peer.suspicion || now < peer.suspicion->decide_at) continue;
    const Suspicion suspicion = std::move(*peer.suspicion);
    peer.suspicion.reset();
    --suspicions_;
    // A peer that has left closes its queue pairs, and what was still to be said to it is lost: no harm.
    if (peer.left && !has_puts_under_way(peer)) continue;
    fail(static_cast<int>(rank), suspicion.status.code(), suspicion.status.sentence());
  }
}

void VerbsTransport::fail(int rank, mk_status_t code, const std::string& why) {
  Peer& peer = peers_[static_cast<size_t>(rank)];
  if (peer.failed) return;
  peer.failed = true;
  if (peer.suspicion) {
    peer.suspicion.reset();
    --suspicions_;
  }
  for (Link& link : peer.links) {
    jobs_ -= static_cast<uint32_t>(link.jobs.size());
    link.jobs.clear();
  }
  failures_.push_back(
      {rank, Status(code, format("rank %d: %s link to rank %d: %s", rank_, name_, rank, why.c_str()))});
}

}  // namespace mk::verbs
