// SPDX-License-Identifier: MIT
// Completion queues and completion channels.
#pragma once

#include <infiniband/verbs.h>

#include <cstdint>
#include <deque>
#include <mutex>
#include <vector>

namespace softnic {

struct QueuePair;
struct CompletionQueue;

struct CompletionChannel : ibv_comp_channel {
  std::mutex events_mutex;
  std::deque<CompletionQueue*> events;  // one count in `fd`, a semaphore, for each

  void add(CompletionQueue* cq);
  void forget(const CompletionQueue* cq);
};

struct Completion {
  ibv_wc wc{};
  QueuePair* qp = nullptr;
  bool is_receive = false;
  bool solicited = false;
  uint64_t retires = 0;  // the queue's slots before this number are free once the completion was polled
};

struct CompletionQueue : ibv_cq_ex {
  std::mutex entries_mutex;
  std::deque<Completion> entries;
  size_t capacity = 0;
  enum class Armed : uint8_t { no, solicited, any } armed = Armed::no;
  bool overrun = false;
  uint32_t events_given = 0;  // by ibv_get_cq_event, guarded by ibv_cq::mutex
  uint32_t async_given = 0;   // by ibv_get_async_event, the same
  int num_users = 0;          // QPs, guarded by the NIC's mutex
  Completion current;         // of start_poll and next_poll

  CompletionQueue(ibv_context* owner, uint32_t num_entries, void* user, CompletionChannel* events_to);
  ~CompletionQueue();

  // False when it is full: then it is in error for good, and what comes after is lost.
  bool push(const Completion& completion);
  int poll(int num_entries, ibv_wc* completions);
  bool poll_one(Completion& completion);
  void arm(bool solicited_only);
  // Takes out what a QP left behind.
  void purge(const QueuePair* qp);
};

inline CompletionQueue* to_queue(ibv_cq* cq) {
  return static_cast<CompletionQueue*>(reinterpret_cast<ibv_cq_ex*>(cq));
}
inline ibv_cq* to_verbs(CompletionQueue* cq) { return ibv_cq_ex_to_cq(cq); }

// The calls of ibv_cq_ex.
void set_extended_calls(CompletionQueue& cq);

}  // namespace softnic
