// SPDX-License-Identifier: MIT
// The NIC as the one that sends: requests out, replies in, completions.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "capabilities.h"
#include "nic.h"

namespace softnic {
namespace {

constexpr int kRequestsATurn = 16;
// How far ahead of its pace a NIC hands packets over: the receiver holds them until they are due, so this costs
// no accuracy, and it hides how late threads wake.
constexpr uint64_t kPaceLeadNs = 200000;
constexpr uint64_t kShortestRetryNs = 1000000;
constexpr uint64_t kLongestRetryNs = 20000000;
constexpr double kSrdTimeoutNs = 32e9;  // before the divisor
constexpr uint8_t kEndlessRnrRetry = 7;
constexpr uint64_t kSrdRnrDelayNs = 100000;

// Until a QP gives up on a peer that does not answer; 0: never.
uint64_t patience_ns(const QueuePair& qp, double scale) {
  if (qp.is_srd) return static_cast<uint64_t>(kSrdTimeoutNs * scale);
  if (qp.attributes.timeout == 0) return 0;
  return static_cast<uint64_t>(4096 * std::exp2(qp.attributes.timeout) * (qp.attributes.retry_cnt + 1) * scale);
}

}  // namespace

bool Nic::transmit() {
  bool any = false;
  for (size_t index = 0; index < active_.size();) {
    QueuePair* const qp = active_[index];
    any = transmit_from(qp) || any;
    const bool idle = qp->retries.empty() && qp->find(qp->next_unsent) == nullptr;
    if (qp->current_state.load() != IBV_QPS_RTS || qp->failing || idle) {
      qp->active = false;
      active_.erase(active_.begin() + static_cast<std::ptrdiff_t>(index));
    } else {
      ++index;
    }
  }
  return any;
}

bool Nic::transmit_from(QueuePair* qp) {
  bool any = false;
  for (int turn = 0; turn < kRequestsATurn; ++turn) {
    if (qp->current_state.load() != IBV_QPS_RTS || qp->failing) return any;
    WorkRequest* const request = next_request(qp);
    if (request == nullptr || !send_request(qp, *request)) return any;
    any = true;
  }
  return any;
}

WorkRequest* Nic::next_request(QueuePair* qp) {
  const uint64_t now = now_ns();
  while (!qp->retries.empty()) {
    const auto due = qp->retries.begin();
    if (due->first > now) {
      wake_by(due->first);
      break;
    }
    WorkRequest* const request = due->second.empty() ? nullptr : qp->find(due->second.back());
    if (!due->second.empty()) due->second.pop_back();
    if (due->second.empty()) qp->retries.erase(due);
    if (request != nullptr && request->stage == WorkRequest::Stage::queued) return request;
  }
  WorkRequest* const request = qp->find(qp->next_unsent);
  if (request != nullptr && qp->resume_ns > now) {
    wake_by(qp->resume_ns);
    return nullptr;
  }
  return request;
}

// False: not now.
bool Nic::send_request(QueuePair* qp, WorkRequest& request) {
  const uint64_t now = now_ns();
  if (ns_per_byte_ > 0 && egress_free_ns_ > now + kPaceLeadNs) {
    // What was taken off the list of retries goes back there.
    if (request.sequence != qp->next_unsent) qp->retries[now].push_back(request.sequence);
    wake_by(egress_free_ns_ - kPaceLeadNs / 2);
    return false;
  }
  if (request.sequence == qp->next_unsent) ++qp->next_unsent;
  if (const uint8_t status = check_local(*qp, request); status != IBV_WC_SUCCESS) {
    finish(qp, request, status, qp->is_srd ? static_cast<uint8_t>(EfaStatus::invalid_lkey) : 0);
    return true;
  }
  if (request.failing_since_ns == 0 && strike_sender(qp, request)) return true;
  const Address remote = qp->is_srd ? request.destination : qp->remote;
  const bool reachable = remote.endpoint != 0 && !silent_ && port_is_up(qp->attributes.port_num);
  const std::shared_ptr<Link> link = reachable ? wire_->open(remote.endpoint) : nullptr;
  request.attempt = qp->is_srd ? request.attempt : qp->attempt;
  request.stage = WorkRequest::Stage::sent;
  if (link != nullptr) {
    request.link = link;
    export_memory(link, request);
  }
  if (link == nullptr || !wire_->send(link, make_request(*qp, request))) unanswered(qp, request);
  return true;
}

// The faults that strike at the sender. True: the request is not to be sent.
bool Nic::strike_sender(QueuePair* qp, WorkRequest& request) {
  const Adversity& adversity = configuration_->adversity;
  if (!adversity.any()) return false;
  const uint32_t target = qp->is_srd ? request.target_qp : qp->attributes.dest_qp_num;
  const Subject subject{index_, qp->number(), target, request.sequence, 0};
  if (adversity.strikes(Hazard::error, subject)) {
    finish(qp, request, static_cast<uint8_t>(adversity.parameter(Hazard::error)), 0);
    return true;
  }
  if (adversity.strikes(Hazard::qp_fatal, subject)) {
    raise_qp(qp, IBV_EVENT_QP_FATAL);
    fail(qp);
    return true;
  }
  if (adversity.strikes(Hazard::port_down, subject)) fail_port(qp->attributes.port_num);
  if (adversity.strikes(Hazard::vanish, subject)) silent_ = true;
  if (adversity.strikes(Hazard::device_fatal, subject) && !std::exchange(silent_, true)) {
    ibv_async_event event{};
    event.event_type = IBV_EVENT_DEVICE_FATAL;
    raise(event);
  }
  return false;
}

uint8_t Nic::check_local(const QueuePair& qp, const WorkRequest& request) {
  if (request.is_inline) return IBV_WC_SUCCESS;
  for (uint32_t index = 0; index < request.num_segments; ++index) {
    const Segment& segment = request.payload.segments[index];
    if (segment.bytes == 0) continue;
    const MemoryRegion* const region = find_memory(segment.key);
    if (region == nullptr || region->pd != qp.qp_base.pd) return IBV_WC_LOC_PROT_ERR;
    const uint64_t offset = segment.address - region->iova;
    if (segment.address < region->iova || offset > region->length || segment.bytes > region->length - offset) {
      return IBV_WC_LOC_PROT_ERR;
    }
    if (request.opcode == IBV_WR_RDMA_READ && (region->access & IBV_ACCESS_LOCAL_WRITE) == 0) {
      return IBV_WC_LOC_PROT_ERR;
    }
  }
  return request.opcode == IBV_WR_RDMA_READ && request.bytes > kMaxReadBytes ? IBV_WC_LOC_QP_OP_ERR
                                                                             : IBV_WC_SUCCESS;
}

Packet Nic::make_request(const QueuePair& qp, const WorkRequest& request) {
  Packet packet;
  packet.kind = PacketKind::request;
  packet.opcode = static_cast<uint8_t>(request.opcode);
  packet.source_endpoint = wire_->endpoint();
  packet.source_nic = static_cast<uint8_t>(index_);
  packet.path = qp.path;
  packet.is_inline = request.is_inline ? 1 : 0;
  packet.solicited = request.solicited ? 1 : 0;
  packet.source_port = qp.attributes.port_num;
  packet.target_port = qp.is_srd ? request.destination.port : qp.remote.port;
  packet.source_qp = qp.number();
  packet.target_qp = qp.is_srd ? request.target_qp : qp.attributes.dest_qp_num;
  packet.psn = (qp.attributes.sq_psn + static_cast<uint32_t>(request.sequence)) & 0xffffff;
  packet.attempt = request.attempt;
  packet.immediate = request.immediate;
  packet.rkey = request.rkey;
  packet.bytes = request.bytes;
  packet.qkey = request.qkey;
  packet.num_segments = request.num_segments;
  packet.sequence = request.sequence;
  packet.remote_address = request.remote_address;
  packet.arrival_ns = pace(request.bytes);
  packet.payload = request.payload;
  if (!request.is_inline) {
    // Registered addresses may differ from real ones (iova); the peer reads the real ones.
    for (uint32_t index = 0; index < request.num_segments; ++index) {
      Segment& segment = packet.payload.segments[index];
      const MemoryRegion* const region = segment.bytes > 0 ? find_memory(segment.key) : nullptr;
      if (region == nullptr) continue;
      segment.address += reinterpret_cast<uint64_t>(region->addr) - region->iova;
      if (region->device >= 0) packet.gpu_segments |= 1u << index;
    }
  }
  packet.size = kPacketHead + payload_bytes(packet);
  return packet;
}

// When a message of so many bytes that starts now has arrived at the other end.
uint64_t Nic::pace(uint32_t bytes) {
  if (ns_per_byte_ <= 0) return latency_ns_ == 0 ? 0 : now_ns() + latency_ns_;
  egress_free_ns_ = std::max(egress_free_ns_, now_ns()) + static_cast<uint64_t>(bytes * ns_per_byte_);
  return egress_free_ns_ + latency_ns_;
}

void Nic::on_reply(const std::shared_ptr<Link>& link, const Packet& packet) {
  QueuePair* const qp = find(packet.target_qp);
  if (qp == nullptr || qp->current_state.load() != IBV_QPS_RTS) return;
  WorkRequest* const request = qp->find(packet.sequence);
  // A reply to an attempt that was given up, or for a QP of that number that is no more.
  if (request == nullptr || request->stage != WorkRequest::Stage::sent || request->link != link ||
      (packet.kind != PacketKind::acknowledge && packet.attempt != request->attempt)) {
    return;
  }
  if (silent_ || packet.kind == PacketKind::unanswered) {
    unanswered(qp, *request);
    return;
  }
  request->failing_since_ns = 0;
  switch (packet.kind) {
    case PacketKind::acknowledge:
      if (request->opcode == IBV_WR_RDMA_READ) scatter(*request, packet);
      finish(qp, *request, IBV_WC_SUCCESS, 0);
      return;
    case PacketKind::not_ready:
      on_not_ready(qp, *request, packet);
      return;
    case PacketKind::refuse:
      finish(qp, *request, packet.status, packet.vendor);
      return;
    default:
      return;
  }
}

void Nic::on_not_ready(QueuePair* qp, WorkRequest& request, const Packet& packet) {
  const uint8_t limit = qp->attributes.rnr_retry;
  if (limit != kEndlessRnrRetry && request.num_rnr >= limit) {
    finish(qp, request, IBV_WC_RNR_RETRY_EXC_ERR, qp->is_srd ? static_cast<uint8_t>(EfaStatus::not_ready) : 0);
    return;
  }
  ++request.num_rnr;
  retry(qp, request, qp->is_srd ? kSrdRnrDelayNs : packet.bytes);
}

void Nic::unanswered(QueuePair* qp, WorkRequest& request) {
  const uint64_t now = now_ns();
  if (request.failing_since_ns == 0) request.failing_since_ns = now;
  const uint64_t patience = patience_ns(*qp, configuration_->timeout_scale);
  if (patience != 0 && now - request.failing_since_ns >= patience) {
    finish(qp, request, qp->is_srd ? IBV_WC_RESP_TIMEOUT_ERR : IBV_WC_RETRY_EXC_ERR,
           qp->is_srd ? static_cast<uint8_t>(EfaStatus::unresponsive) : 0);
    return;
  }
  retry(qp, request, std::clamp(patience / 32, kShortestRetryNs, kLongestRetryNs));
}

// RC sends everything from this request on again, SRD only this one.
void Nic::retry(QueuePair* qp, WorkRequest& request, uint64_t delay_ns) {
  const uint64_t when = now_ns() + delay_ns;
  if (qp->is_srd) {
    ++request.attempt;
    request.stage = WorkRequest::Stage::queued;
    qp->retries[when].push_back(request.sequence);
  } else {
    ++qp->attempt;
    for (WorkRequest* again = &request; again != nullptr; again = qp->find(again->sequence + 1)) {
      if (again->stage == WorkRequest::Stage::sent) again->stage = WorkRequest::Stage::queued;
    }
    qp->next_unsent = request.sequence;
    qp->resume_ns = when;
  }
  wake_by(when);
  if (!std::exchange(qp->active, true)) active_.push_back(qp);
}

void Nic::finish(QueuePair* qp, WorkRequest& request, uint8_t status, uint8_t vendor) {
  request.stage = WorkRequest::Stage::done;
  request.status = status;
  request.vendor = vendor;
  if (status != IBV_WC_SUCCESS && request.link != nullptr) qp->unsettled.insert(request.link);
  request.link = nullptr;
  if (qp->is_srd) {
    complete(qp, request);
  } else if (status != IBV_WC_SUCCESS) {
    qp->failing = true;
  }
  // RC completes in order; the first failure is the last thing that happens.
  while (!qp->sending.empty() && qp->sending.front().stage == WorkRequest::Stage::done) {
    const WorkRequest first = std::move(qp->sending.front());
    qp->sending.pop_front();
    if (qp->is_srd) continue;
    complete(qp, first);
    if (first.status == IBV_WC_SUCCESS) continue;
    fail(qp);
    return;
  }
}

void Nic::complete(QueuePair* qp, const WorkRequest& request) {
  if (!request.signaled && !qp->signal_all && request.status == IBV_WC_SUCCESS) return;
  Completion completion;
  completion.qp = qp;
  completion.retires = request.sequence + 1;
  completion.wc.wr_id = request.wr_id;
  completion.wc.status = static_cast<ibv_wc_status>(request.status);
  completion.wc.opcode = request.opcode == IBV_WR_RDMA_READ ? IBV_WC_RDMA_READ : IBV_WC_RDMA_WRITE;
  completion.wc.vendor_err = request.vendor;
  completion.wc.byte_len = request.bytes;
  completion.wc.qp_num = qp->number();
  push(to_queue(qp->qp_base.send_cq), completion);
}

void Nic::scatter(const WorkRequest& request, const Packet& packet) {
  uint32_t offset = 0;
  for (uint32_t index = 0; index < request.num_segments; ++index) {
    const Segment& segment = request.payload.segments[index];
    const MemoryRegion* const region = find_memory(segment.key);
    if (region == nullptr || offset + segment.bytes > packet.bytes) return;
    copy_small(region, static_cast<std::byte*>(region->addr) + (segment.address - region->iova),
               packet.payload.inline_data + offset, segment.bytes);
    offset += segment.bytes;
  }
}

}  // namespace softnic
