// SPDX-License-Identifier: MIT
#include "completion_queue.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "queue_pair.h"

namespace softnic {
namespace {

CompletionQueue& extended(ibv_cq_ex* cq) { return *static_cast<CompletionQueue*>(cq); }

int next_poll(ibv_cq_ex* cq) {
  CompletionQueue& queue = extended(cq);
  if (!queue.poll_one(queue.current)) return ENOENT;
  cq->status = queue.current.wc.status;
  cq->wr_id = queue.current.wc.wr_id;
  return 0;
}

int start_poll(ibv_cq_ex* cq, ibv_poll_cq_attr* attributes) {
  if (attributes != nullptr && attributes->comp_mask != 0) return EINVAL;
  return next_poll(cq);
}

}  // namespace

void CompletionChannel::add(CompletionQueue* cq) {
  {
    const std::lock_guard lock(events_mutex);
    events.push_back(cq);
  }
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(fd, &one, sizeof(one));
}

void CompletionChannel::forget(const CompletionQueue* cq) {
  const std::lock_guard lock(events_mutex);
  for (size_t gone = std::erase(events, cq); gone > 0; --gone) {
    uint64_t count = 0;
    [[maybe_unused]] const ssize_t taken = ::read(fd, &count, sizeof(count));
  }
}

CompletionQueue::CompletionQueue(ibv_context* owner, uint32_t num_entries, void* user,
                                 CompletionChannel* events_to)
    : ibv_cq_ex{}, capacity(num_entries) {
  context = owner;
  channel = events_to;
  cq_context = user;
  cqe = static_cast<int>(num_entries);
  pthread_mutex_init(&mutex, nullptr);
  pthread_cond_init(&cond, nullptr);
}

CompletionQueue::~CompletionQueue() {
  pthread_cond_destroy(&cond);
  pthread_mutex_destroy(&mutex);
}

bool CompletionQueue::push(const Completion& completion) {
  const std::lock_guard lock(entries_mutex);
  if (overrun || entries.size() >= capacity) {
    const bool first = !overrun;
    overrun = true;
    return !first;
  }
  entries.push_back(completion);
  const bool notable = completion.solicited || completion.wc.status != IBV_WC_SUCCESS;
  if (armed == Armed::any || (armed == Armed::solicited && notable)) {
    armed = Armed::no;
    if (channel != nullptr) static_cast<CompletionChannel*>(channel)->add(this);
  }
  return true;
}

bool CompletionQueue::poll_one(Completion& completion) {
  const std::lock_guard lock(entries_mutex);
  if (entries.empty()) return false;
  completion = entries.front();
  entries.pop_front();
  if (completion.qp != nullptr) completion.qp->retire(completion.is_receive, completion.retires);
  return true;
}

int CompletionQueue::poll(int num_entries, ibv_wc* completions) {
  int polled = 0;
  Completion completion;
  for (; polled < num_entries && poll_one(completion); ++polled) completions[polled] = completion.wc;
  return polled;
}

void CompletionQueue::arm(bool solicited_only) {
  const std::lock_guard lock(entries_mutex);
  if (!solicited_only) {
    armed = Armed::any;
  } else if (armed == Armed::no) {
    armed = Armed::solicited;
  }
}

void CompletionQueue::purge(const QueuePair* qp) {
  const std::lock_guard lock(entries_mutex);
  std::erase_if(entries, [&](const Completion& entry) { return entry.qp == qp; });
}

void set_extended_calls(CompletionQueue& cq) {
  cq.start_poll = start_poll;
  cq.next_poll = next_poll;
  cq.end_poll = [](ibv_cq_ex*) {};
  cq.read_opcode = [](ibv_cq_ex* queue) { return extended(queue).current.wc.opcode; };
  cq.read_vendor_err = [](ibv_cq_ex* queue) { return extended(queue).current.wc.vendor_err; };
  cq.read_byte_len = [](ibv_cq_ex* queue) { return extended(queue).current.wc.byte_len; };
  cq.read_imm_data = [](ibv_cq_ex* queue) { return extended(queue).current.wc.imm_data; };
  cq.read_qp_num = [](ibv_cq_ex* queue) { return extended(queue).current.wc.qp_num; };
  cq.read_src_qp = [](ibv_cq_ex* queue) { return extended(queue).current.wc.src_qp; };
  cq.read_wc_flags = [](ibv_cq_ex* queue) { return extended(queue).current.wc.wc_flags; };
  cq.read_slid = [](ibv_cq_ex* queue) -> uint32_t { return extended(queue).current.wc.slid; };
  cq.read_sl = [](ibv_cq_ex* queue) { return extended(queue).current.wc.sl; };
  cq.read_dlid_path_bits = [](ibv_cq_ex* queue) { return extended(queue).current.wc.dlid_path_bits; };
}

}  // namespace softnic
