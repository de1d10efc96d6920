// SPDX-License-Identifier: MIT
// The NIC's thread.
#include <pthread.h>
#include <sched.h>
#include <sys/prctl.h>

#include <algorithm>
#include <limits>
#include <set>
#include <utility>

#include "nic.h"

namespace softnic {
namespace {

constexpr uint64_t kLongestSleepNs = 1000000000;

}  // namespace

void Nic::run() {
  pthread_setname_np(pthread_self(), "softnic");
  prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0);
  const uint64_t busy_ns = configuration_->busy_us * 1000ull;
  uint64_t last_busy = now_ns();
  Lock lock(mutex_);
  while (!stopping_) {
    wake_ns_ = std::numeric_limits<uint64_t>::max();
    bool busy = wire_->receive([this](const auto& link, const Packet& packet) { on_packet(link, packet); },
                               [this](const auto& link) { on_lost(link); });
    busy = dispatch_held() || busy;
    busy = take_doorbells() || busy;
    busy = handle_quiescing() || busy;
    busy = transmit() || busy;
    wire_->flush();
    busy = place(lock) || busy;
    busy = poll_copies() || busy;
    busy = forget_exports() || busy;
    busy = deliver() || busy;
    wire_->flush();
    const uint64_t wake = wake_ns_;
    const bool copying = !copying_.empty();
    lock.unlock();
    const uint64_t now = now_ns();
    if (busy) {
      last_busy = now;
      if (control_waiting_.load() > 0 || copying) sched_yield();
    } else if (now - last_busy < busy_ns) {
      sched_yield();
    } else if (wake > now) {
      inbox_->sleep(wire_->descriptor(), std::min(wake - now, kLongestSleepNs));
    }
    lock.lock();
  }
}

bool Nic::take_doorbells() {
  std::vector<QueuePair*> rung;
  {
    const std::lock_guard lock(doorbell_mutex_);
    rung.swap(doorbells_);
  }
  for (QueuePair* qp : rung) {
    // First the flag, then the requests: what is posted in between rings again.
    qp->rung.store(false);
    {
      const std::lock_guard lock(qp->post_mutex);
      for (WorkRequest& request : qp->posted) qp->sending.push_back(std::move(request));
      qp->posted.clear();
    }
    if (qp->current_state.load() == IBV_QPS_ERR) {
      if (!qp->quiescing && qp->fences == 0 && !qp->discarding) flush(qp);
    } else if (!std::exchange(qp->active, true)) {
      active_.push_back(qp);
    }
  }
  return !rung.empty();
}

bool Nic::dispatch_held() {
  bool any = false;
  while (!held_.empty() && held_.begin()->first <= now_ns()) {
    const auto [link, packet] = held_.begin()->second;
    held_.erase(held_.begin());
    on_reply(link, packet);
    any = true;
  }
  if (!held_.empty()) wake_by(held_.begin()->first);
  return any;
}

void Nic::on_packet(const std::shared_ptr<Link>& link, const Packet& packet) {
  switch (packet.kind) {
    case PacketKind::request:
      on_request(link, packet);
      return;
    case PacketKind::fence:
      on_fence(link, packet);
      return;
    case PacketKind::export_memory:
      on_export(link, packet);
      return;
    case PacketKind::forget_memory:
      settle_copies();
      link->imports.erase(packet.rkey);
      return;
    case PacketKind::fence_reply: {
      const auto fence = std::find(fences_.begin(), fences_.end(), std::pair(link, packet.target_qp));
      if (fence == fences_.end()) return;
      fences_.erase(fence);
      QueuePair* const qp = find(packet.target_qp);
      if (qp != nullptr && --qp->fences == 0) on_quiesced(qp);
      return;
    }
    default:
      break;
  }
  uint64_t due = packet.arrival_ns;
  const Subject subject{index_, packet.target_qp, packet.source_qp, packet.sequence, packet.attempt};
  const Adversity& adversity = configuration_->adversity;
  if (adversity.strikes(Hazard::late, subject)) {
    const uint64_t range = adversity.parameter(Hazard::late) * 1000ull + 1;
    due = now_ns() + adversity.choice(Hazard::late, subject) % range;
  }
  if (due > now_ns()) {
    held_.emplace(due, std::pair(link, packet));
    wake_by(due);
  } else {
    on_reply(link, packet);
  }
}

void Nic::on_lost(const std::shared_ptr<Link>& link) {
  for (auto fence = fences_.begin(); fence != fences_.end();) {
    if (fence->first != link) {
      ++fence;
      continue;
    }
    QueuePair* const qp = find(fence->second);
    fence = fences_.erase(fence);
    if (qp != nullptr && --qp->fences == 0) on_quiesced(qp);
  }
  for (auto& entry : queue_pairs_) {
    QueuePair* const qp = entry.second.get();
    // What the peer's memory was needed for can no longer be done.
    drop_arrivals(qp, link.get(), 0);
    std::vector<uint64_t> cut_off;
    for (const WorkRequest& request : qp->sending) {
      if (request.stage == WorkRequest::Stage::sent && request.link == link)
        cut_off.push_back(request.sequence);
    }
    for (const uint64_t sequence : cut_off) {
      if (WorkRequest* const request = qp->find(sequence)) unanswered(qp, *request);
      if (!qp->is_srd) break;
    }
  }
}

// Asks every peer that may still read memory for a QP to stop.
bool Nic::handle_quiescing() {
  const std::vector<QueuePair*> wanted = std::exchange(quiescing_, {});
  for (QueuePair* qp : wanted) {
    // Of requests without an answer, or with one that this NIC did not take: an earlier attempt may be there
    // still.
    std::set<std::shared_ptr<Link>> links = std::exchange(qp->unsettled, {});
    for (const WorkRequest& request : qp->sending) {
      if (request.link != nullptr) links.insert(request.link);
    }
    for (const std::shared_ptr<Link>& link : links) {
      Packet fence;
      fence.size = kPacketHead;
      fence.kind = PacketKind::fence;
      fence.source_endpoint = wire_->endpoint();
      fence.source_qp = qp->number();
      if (!wire_->send(link, fence)) continue;
      fences_.emplace_back(link, qp->number());
      ++qp->fences;
    }
    qp->quiescing = false;
    if (qp->fences == 0) on_quiesced(qp);
  }
  return !wanted.empty();
}

void Nic::on_quiesced(QueuePair* qp) {
  if (qp->current_state.load() == IBV_QPS_ERR && !qp->discarding) flush(qp);
  changed_.notify_all();
}

// The QP goes into the error state; the rest is flushed once no peer reads for it.
void Nic::fail(QueuePair* qp) {
  if (qp->current_state.load() == IBV_QPS_ERR) return;
  set_state(qp, IBV_QPS_ERR);
  if (std::exchange(qp->quiescing, true)) return;
  quiescing_.push_back(qp);
}

void Nic::flush(QueuePair* qp) {
  {
    const std::lock_guard lock(qp->post_mutex);
    for (WorkRequest& request : qp->posted) qp->sending.push_back(std::move(request));
    qp->posted.clear();
  }
  const uint8_t vendor = qp->is_srd ? 1 : 0;
  while (!qp->sending.empty()) {
    WorkRequest request = std::move(qp->sending.front());
    qp->sending.pop_front();
    if (request.stage == WorkRequest::Stage::done && qp->is_srd) continue;
    request.status = IBV_WC_WR_FLUSH_ERR;
    request.vendor = vendor;
    complete(qp, request);
  }
  qp->retries.clear();
  drop_arrivals(qp, nullptr, 0);
  std::deque<std::pair<uint64_t, uint64_t>> receives;
  {
    const std::lock_guard lock(qp->post_mutex);
    receives.swap(qp->receives);
  }
  for (const auto& receive : receives) {
    Completion completion;
    completion.qp = qp;
    completion.is_receive = true;
    completion.wc.wr_id = receive.first;
    completion.wc.status = IBV_WC_WR_FLUSH_ERR;
    completion.wc.opcode = IBV_WC_RECV;
    completion.wc.vendor_err = vendor;
    completion.wc.qp_num = qp->number();
    push(to_queue(qp->qp_base.recv_cq), completion);
  }
}

void Nic::push(CompletionQueue* cq, const Completion& completion) {
  if (cq->push(completion)) return;
  ibv_async_event event{};
  event.element.cq = to_verbs(cq);
  event.event_type = IBV_EVENT_CQ_ERR;
  raise(event);
  for (auto& entry : queue_pairs_) {
    const ibv_qp& base = entry.second->qp_base;
    if (to_queue(base.send_cq) == cq || to_queue(base.recv_cq) == cq) fail(entry.second.get());
  }
}

QueuePair* Nic::find(uint32_t number) {
  const auto found = queue_pairs_.find(number);
  return found == queue_pairs_.end() ? nullptr : found->second.get();
}

MemoryRegion* Nic::find_memory(uint32_t key) {
  const auto found = memory_.find(key);
  return found == memory_.end() ? nullptr : found->second.get();
}

}  // namespace softnic
