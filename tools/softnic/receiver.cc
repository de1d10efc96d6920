// SPDX-License-Identifier: MIT
// The NIC as the one that receives: checks, placement of payload, delivery, replies.
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <tuple>
#include <utility>

#include "capabilities.h"
#include "memory.h"
#include "nic.h"

namespace softnic {
namespace {

constexpr uint32_t kPieceBytes = 1u << 20;  // the worker looks after other things between two of them
constexpr size_t kDeliveriesATurn = 16;     // of RC
constexpr int kCopiesATurn = 8;             // started on GPUs
constexpr uint32_t kMaxAdversePieces = 8;
constexpr uint8_t kDefaultRnrTimer = 12;

bool takes_receive(const Packet& packet) { return packet.opcode == IBV_WR_RDMA_WRITE_WITH_IMM; }

}  // namespace

Subject Nic::subject_of(const Packet& packet) const {
  return {index_, packet.source_qp, packet.target_qp, packet.sequence, packet.attempt};
}

void Nic::answer(const std::shared_ptr<Link>& link, const Packet& request, PacketKind kind, uint8_t status,
                 uint8_t vendor, uint32_t bytes) {
  Packet packet;
  packet.size = kPacketHead;
  packet.kind = kind;
  packet.status = status;
  packet.vendor = vendor;
  packet.source_endpoint = wire_->endpoint();
  packet.source_qp = request.target_qp;
  packet.target_qp = request.source_qp;
  packet.attempt = request.attempt;
  packet.sequence = request.sequence;
  packet.bytes = bytes;
  packet.arrival_ns = latency_ns_ == 0 ? 0 : now_ns() + latency_ns_;
  wire_->send(link, packet);
}

void Nic::on_request(const std::shared_ptr<Link>& link, const Packet& packet) {
  QueuePair* const qp = find(packet.target_qp);
  const ibv_qp_state state = qp == nullptr ? IBV_QPS_RESET : qp->current_state.load();
  const bool alive =
      !silent_ && port_is_up(packet.target_port) && !configuration_->is_blocked(packet.source_nic, index_);
  if (!alive || (!is_efa() && state != IBV_QPS_RTR && state != IBV_QPS_RTS)) {
    answer(link, packet, PacketKind::unanswered, 0, 0, 0);
    return;
  }
  if (is_efa() && known_peers_.count(link->peer) == 0) {
    answer(link, packet, PacketKind::refuse, IBV_WC_REM_OP_ERR, static_cast<uint8_t>(EfaStatus::unknown_peer),
           0);
    return;
  }
  if (state != IBV_QPS_RTR && state != IBV_QPS_RTS) {
    answer(link, packet, PacketKind::refuse, IBV_WC_REM_INV_RD_REQ_ERR,
           static_cast<uint8_t>(EfaStatus::bad_dest_qpn), 0);
    return;
  }
  if (!is_expected(qp, link, packet)) return;
  auto arrival = std::make_shared<Arrival>();
  arrival->link = link;
  arrival->packet = packet;
  arrival->refusal = check_remote(*qp, packet);
  if (qp->is_srd && arrival->refusal != 0) arrival->vendor = static_cast<uint8_t>(EfaStatus::bad_address);
  if (arrival->refusal == 0 && takes_receive(packet) && !take_receive(qp, *arrival)) {
    qp->refused_attempt = packet.attempt;
    const uint8_t timer = qp->is_srd ? kDefaultRnrTimer : qp->attributes.min_rnr_timer;
    answer(link, packet, PacketKind::not_ready, 0, 0, static_cast<uint32_t>(rnr_delay_ns(timer)));
    return;
  }
  ++qp->expected_sequence;
  qp->refusing = !qp->is_srd && arrival->refusal != 0;
  plan_placement(*arrival);
  if (qp->arrivals.empty()) delivering_.push_back(qp);
  qp->arrivals.push_back(arrival);
  if (arrival->refusal == 0 && packet.bytes > 0 && packet.opcode != IBV_WR_RDMA_READ) {
    unplaced_.push_back(arrival);
  }
}

// Whether this is what the QP waits for; what is not has been answered or is to be ignored.
bool Nic::is_expected(QueuePair* qp, const std::shared_ptr<Link>& link, const Packet& packet) {
  // A stranger, perhaps of a job that had this NIC's number before, changes nothing between the QP and its
  // peer.
  const bool is_peer =
      packet.path == qp->path &&
      (qp->is_srd ? packet.qkey == qp->attributes.qkey
                  : link->peer == qp->remote.endpoint && packet.source_qp == qp->attributes.dest_qp_num);
  if (!is_peer) {
    answer(link, packet, PacketKind::unanswered, 0, 0, 0);
    return false;
  }
  if (qp->is_srd) return true;
  // What follows a request that was turned away is sent again with it.
  if (qp->refusing || qp->refused_attempt == static_cast<int64_t>(packet.attempt)) return false;
  const uint32_t psn = (qp->attributes.rq_psn + static_cast<uint32_t>(qp->expected_sequence)) & 0xffffff;
  if (packet.sequence == qp->expected_sequence && packet.psn == psn) {
    qp->refused_attempt = -1;
    return true;
  }
  qp->refused_attempt = packet.attempt;
  answer(link, packet, PacketKind::unanswered, 0, 0, 0);
  return false;
}

uint8_t Nic::check_remote(const QueuePair& qp, const Packet& packet) {
  const bool read = packet.opcode == IBV_WR_RDMA_READ;
  const bool write = packet.opcode == IBV_WR_RDMA_WRITE || packet.opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
  if (!read && !write) return IBV_WC_REM_INV_REQ_ERR;
  uint64_t covered = packet.is_inline != 0 || read ? packet.bytes : 0;
  for (uint32_t index = 0; packet.is_inline == 0 && index < packet.num_segments && !read; ++index) {
    covered += packet.payload.segments[index].bytes;
  }
  if (covered != packet.bytes || packet.bytes > kMaxMessageBytes || (read && packet.bytes > kMaxReadBytes)) {
    return IBV_WC_REM_INV_REQ_ERR;
  }
  // InfiniBand Architecture Specification, volume 1, 9.7.4.1.5: without bytes there is nothing to protect.
  if (packet.bytes == 0) return IBV_WC_SUCCESS;
  const unsigned access = read ? IBV_ACCESS_REMOTE_READ : IBV_ACCESS_REMOTE_WRITE;
  if (!qp.is_srd && (qp.attributes.qp_access_flags & access) == 0) return IBV_WC_REM_ACCESS_ERR;
  const MemoryRegion* const region = find_memory(packet.rkey);
  if (region == nullptr || region->pd != qp.qp_base.pd || (region->access & access) == 0) {
    return IBV_WC_REM_ACCESS_ERR;
  }
  const uint64_t offset = packet.remote_address - region->iova;
  if (packet.remote_address < region->iova || offset > region->length ||
      packet.bytes > region->length - offset) {
    return IBV_WC_REM_ACCESS_ERR;
  }
  return IBV_WC_SUCCESS;
}

bool Nic::take_receive(QueuePair* qp, Arrival& arrival) {
  if (configuration_->adversity.strikes(Hazard::rnr, subject_of(arrival.packet))) return false;
  const std::lock_guard lock(qp->post_mutex);
  if (qp->receives.empty()) return false;
  std::tie(arrival.receive_wr_id, arrival.receive_index) = qp->receives.front();
  qp->receives.pop_front();
  arrival.has_receive = true;
  return true;
}

void Nic::plan_placement(Arrival& arrival) {
  const Packet& packet = arrival.packet;
  const Adversity& adversity = configuration_->adversity;
  const Subject subject = subject_of(packet);
  arrival.piece_bytes = kPieceBytes;
  arrival.deliver_ns = packet.arrival_ns;
  if (ns_per_byte_ > 0) {
    // Many senders share what one NIC can take in.
    const uint64_t taken = static_cast<uint64_t>(packet.bytes * ns_per_byte_);
    arrival.deliver_ns = std::max(arrival.deliver_ns, ingress_free_ns_ + taken);
    ingress_free_ns_ = arrival.deliver_ns;
  }
  if (!adversity.any()) return;
  if (adversity.strikes(Hazard::delay, subject)) {
    const uint64_t range = adversity.parameter(Hazard::delay) * 1000ull + 1;
    arrival.deliver_ns = now_ns() + adversity.choice(Hazard::delay, subject) % range;
  }
  if (!adversity.strikes(Hazard::place, subject) || packet.bytes == 0) return;
  Random random(adversity.choice(Hazard::place, subject));
  arrival.random = random.next() | 1;
  const uint32_t pieces = 1 + random.below(kMaxAdversePieces);
  arrival.piece_bytes = std::min(kPieceBytes, (packet.bytes - 1) / pieces + 1);
  for (uint64_t offset = 0; offset < packet.bytes; offset += arrival.piece_bytes) {
    arrival.pieces.push_back(offset);
  }
  for (size_t left = arrival.pieces.size(); left > 1; --left) {
    std::swap(arrival.pieces[left - 1], arrival.pieces[random.below(static_cast<uint32_t>(left))]);
  }
}

// Places some of what has arrived. In order, unless the adversary mixes the requests.
bool Nic::place(Lock& lock) {
  if (unplaced_.empty()) return false;
  const auto is_over = [](const std::shared_ptr<Arrival>& arrival) {
    return arrival->dropped || arrival->refusal != 0 || arrival->placed == arrival->num_pieces();
  };
  if (!configuration_->adversity.has(Hazard::place)) {
    for (int turn = 0; turn < kCopiesATurn && !unplaced_.empty(); ++turn) {
      // A copy: the list may change while the lock is open.
      const std::shared_ptr<Arrival> arrival = unplaced_.front();
      place_piece(arrival, lock);
      if (is_over(arrival)) std::erase(unplaced_, arrival);
      if (arrival->mark == 0) break;  // the CPU has copied
    }
    return true;
  }
  const std::vector<std::shared_ptr<Arrival>> round(unplaced_.begin(), unplaced_.end());
  const uint32_t start = random_.below(static_cast<uint32_t>(round.size()));
  for (size_t step = 0; step < round.size(); ++step) {
    const std::shared_ptr<Arrival>& arrival = round[(start + step) % round.size()];
    Random random(arrival->random);
    while (!is_over(arrival) && (arrival->random == 0 || random.coin())) place_piece(arrival, lock);
    if (arrival->random != 0) arrival->random = random.next() | 1;
  }
  std::erase_if(unplaced_, is_over);
  return true;
}

void Nic::place_piece(const std::shared_ptr<Arrival>& arrival, Lock& lock) {
  if (arrival->dropped) return;
  const uint64_t offset = arrival->pieces.empty() ? uint64_t{arrival->placed} * arrival->piece_bytes
                                                  : arrival->pieces[arrival->placed];
  const uint32_t bytes = arrival->piece_length(offset);
  QueuePair* const qp = find(arrival->packet.target_qp);
  MemoryRegion* const region = find_memory(arrival->packet.rkey);
  if (region == nullptr || qp == nullptr) {
    arrival->refusal = IBV_WC_REM_ACCESS_ERR;
    return;
  }
  if (region->device >= 0 || arrival->packet.gpu_segments != 0) {
    place_on_gpu(arrival, *region);
    return;
  }
  std::byte* const target =
      static_cast<std::byte*>(region->addr) + (arrival->packet.remote_address - region->iova) + offset;
  copying_memory_ = region;
  copying_qp_ = qp;
  lock.unlock();
  const int error = fetch(*arrival->link, arrival->packet, offset, target, bytes);
  lock.lock();
  copying_memory_ = nullptr;
  copying_qp_ = nullptr;
  changed_.notify_all();
  if (error == 0) {
    ++arrival->placed;
  } else if (error == ESRCH) {
    // Its link says so, too, before long. Nothing that it sent and that is not here yet will ever be.
    drop_arrivals(qp, arrival->link.get(), 0);
  } else {
    arrival->refusal = IBV_WC_REM_OP_ERR;
  }
}

bool Nic::deliver() {
  bool any = false;
  for (size_t index = 0; index < delivering_.size();) {
    QueuePair* const qp = delivering_[index];
    any = deliver_from(qp) || any;
    if (qp->arrivals.empty()) {
      delivering_.erase(delivering_.begin() + static_cast<std::ptrdiff_t>(index));
    } else {
      ++index;
    }
  }
  return any;
}

// RC delivers in order, SRD what is ready.
bool Nic::deliver_from(QueuePair* qp) {
  bool any = false;
  const bool reorder = qp->is_srd && configuration_->adversity.has(Hazard::reorder);
  const size_t count = qp->arrivals.size();
  const size_t start = reorder ? random_.below(static_cast<uint32_t>(count)) : 0;
  // RC gets no further than what is ready: most often the first one.
  const size_t seen = qp->is_srd ? count : std::min(count, kDeliveriesATurn);
  std::vector<std::shared_ptr<Arrival>> round(qp->arrivals.begin(),
                                              qp->arrivals.begin() + static_cast<std::ptrdiff_t>(seen));
  std::rotate(round.begin(), round.begin() + static_cast<std::ptrdiff_t>(start), round.end());
  for (const std::shared_ptr<Arrival>& arrival : round) {
    const bool write = arrival->packet.opcode != IBV_WR_RDMA_READ;
    bool ready =
        arrival->mark == 0 && (arrival->refusal != 0 || !write || arrival->placed == arrival->num_pieces());
    if (arrival->deliver_ns != 0 && ready && arrival->deliver_ns > now_ns()) {
      ready = false;
      wake_by(arrival->deliver_ns);
    }
    if (ready && reorder && random_.coin()) {
      any = true;
      continue;
    }
    if (ready) {
      any = true;
      std::erase(qp->arrivals, arrival);
      deliver_one(qp, arrival);
      if (qp->current_state.load() == IBV_QPS_ERR) return true;
    } else if (!qp->is_srd) {
      break;
    }
  }
  return any;
}

void Nic::deliver_one(QueuePair* qp, const std::shared_ptr<Arrival>& arrival) {
  const Packet& packet = arrival->packet;
  if (arrival->refusal != 0) {
    answer(arrival->link, packet, PacketKind::refuse, arrival->refusal, arrival->vendor, 0);
    if (qp->is_srd) return;
    raise_qp(qp, arrival->refusal == IBV_WC_REM_ACCESS_ERR ? IBV_EVENT_QP_ACCESS_ERR : IBV_EVENT_QP_REQ_ERR);
    fail(qp);
    return;
  }
  if (arrival->has_receive) {
    Completion completion;
    completion.qp = qp;
    completion.is_receive = true;
    completion.solicited = packet.solicited != 0;
    completion.wc.wr_id = arrival->receive_wr_id;
    completion.wc.opcode = IBV_WC_RECV_RDMA_WITH_IMM;
    completion.wc.byte_len = packet.bytes;
    completion.wc.imm_data = packet.immediate;
    completion.wc.wc_flags = IBV_WC_WITH_IMM;
    completion.wc.qp_num = qp->number();
    completion.wc.src_qp = packet.source_qp;
    const auto known = known_peers_.find(arrival->link->peer);
    if (known != known_peers_.end()) completion.wc.slid = known->second.number;
    push(to_queue(qp->qp_base.recv_cq), completion);
  }
  reply(*arrival, PacketKind::acknowledge);
}

// A read's bytes travel in the reply.
void Nic::reply(const Arrival& arrival, PacketKind kind) {
  const Packet& request = arrival.packet;
  if (request.opcode != IBV_WR_RDMA_READ) {
    answer(arrival.link, request, kind, 0, 0, 0);
    return;
  }
  Packet packet;
  packet.kind = kind;
  packet.source_endpoint = wire_->endpoint();
  packet.source_qp = request.target_qp;
  packet.target_qp = request.source_qp;
  packet.attempt = request.attempt;
  packet.sequence = request.sequence;
  packet.is_inline = 1;
  const MemoryRegion* const region = find_memory(request.rkey);
  packet.bytes = region == nullptr ? 0 : request.bytes;
  packet.arrival_ns = latency_ns_ == 0 ? 0 : now_ns() + latency_ns_;
  if (packet.bytes > 0) {
    copy_small(region, packet.payload.inline_data,
               static_cast<const std::byte*>(region->addr) + (request.remote_address - region->iova),
               packet.bytes);
  }
  packet.size = kPacketHead + payload_bytes(packet);
  wire_->send(arrival.link, packet);
}

void Nic::on_fence(const std::shared_ptr<Link>& link, const Packet& packet) {
  for (auto& entry : queue_pairs_) drop_arrivals(entry.second.get(), link.get(), packet.source_qp);
  Packet reply;
  reply.size = kPacketHead;
  reply.kind = PacketKind::fence_reply;
  reply.source_endpoint = wire_->endpoint();
  reply.target_qp = packet.source_qp;
  wire_->send(link, reply);
}

// All arrivals of a QP (`link` null), those of a link that broke (`source_qp` 0), or those of one QP of a peer.
// Receive requests that they had taken are free again.
void Nic::drop_arrivals(QueuePair* qp, const Link* link, uint32_t source_qp) {
  std::vector<std::shared_ptr<Arrival>> dropped;
  bool broken = false;  // RC: nothing is delivered past a gap
  for (const std::shared_ptr<Arrival>& arrival : qp->arrivals) {
    const bool placed = arrival->placed == arrival->num_pieces() && arrival->mark == 0;
    const bool cut_off = link != nullptr && source_qp == 0 && !placed && arrival->link.get() == link;
    const bool fenced = link != nullptr && source_qp != 0 && arrival->link.get() == link &&
                        arrival->packet.source_qp == source_qp;
    broken = broken || (cut_off && !qp->is_srd);
    if (link == nullptr || cut_off || fenced || broken) dropped.push_back(arrival);
  }
  const auto copying = [](const std::shared_ptr<Arrival>& arrival) { return arrival->mark != 0; };
  if (std::any_of(dropped.begin(), dropped.end(), copying)) settle_copies();
  for (auto last = dropped.rbegin(); last != dropped.rend(); ++last) {
    (*last)->dropped = true;
    std::erase(qp->arrivals, *last);
    if (!(*last)->has_receive) continue;
    const std::lock_guard lock(qp->post_mutex);
    qp->receives.emplace_front((*last)->receive_wr_id, (*last)->receive_index);
  }
  std::erase_if(unplaced_, [](const std::shared_ptr<Arrival>& arrival) { return arrival->dropped; });
}

}  // namespace softnic
