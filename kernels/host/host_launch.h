// SPDX-License-Identifier: MIT
// One launch of an operator on the host executor, as its roles see it: flags and signals of the epoch's bank,
// receive areas, puts, and waiting.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "../executor.h"
#include "hooks.h"
#include "host_rank.h"
#include "host_trace.h"

namespace mk {

// What a role waits for, so that its deadline can say it.
struct WaitTarget {
  const char* object;  // "chunk", "partial", "node sum", "entry", "put"
  uint64_t index = 0;
  int peer = -1;  // the rank it comes from
  uint64_t seen = 0;
  uint64_t expected = 0;
};

class HostLaunch {
 public:
  HostLaunch(HostRank& rank, const ExecutorContext& context, const OperatorCall& call, const mk_plan_t& plan,
             const Arena& arena, uint64_t epoch);

  HostRank& rank;
  const ExecutorContext& context;
  const OperatorCall& call;
  const mk_plan_t& plan;
  const uint64_t epoch;
  const int bank;
  const HostHooks* const hooks;

  const TopologyView& view() const { return rank.view(); }
  mk_operator_t op() const { return operator_of(call); }
  const GemmCall& gemm() const { return std::get<GemmCall>(call); }
  const MoeCall& moe() const { return std::get<MoeCall>(call); }
  const RingAttentionCall& attention() const { return std::get<RingAttentionCall>(call); }

  // --- receive areas of this epoch's bank
  std::byte* area(size_t offset) const { return peer_area(view().local_rank(), offset); }
  std::byte* peer_area(int local_rank, size_t offset) const {
    return rank.memory().peer(local_rank, arena_.offset + bank * arena_.bank_bytes + offset);
  }
  size_t area_bytes() const { return arena_.bank_bytes; }
  uint64_t area_address(size_t offset) const {
    return region_address(arena_.region, bank * arena_.bank_bytes + offset);
  }

  // --- flags and signals
  bool flag_raised(int index) const;
  void raise_flag(int local_rank, int index) const;  // release: what was written before is visible with it
  uint64_t flag_value(int index) const;
  bool signal_arrived(int index) const { return rank.signal_arrived(bank, index); }
  void take_signal(int index) const { rank.take_signal(bank, index); }

  // --- entries
  bool has_entered(int source) const { return entry_epoch(bank, source) >= epoch; }
  const EntryRecord& entry(int source) const { return *rank.entry(view().local_rank(), bank, source); }
  // Do both ranks of this node offer the same place of symmetric memory for their output? Both have entered.
  bool direct_output(int a, int b) const;
  EntryRecord make_entry() const;
  void publish_entry() const;  // inside the node

  void tile_done(int source) const {
    if (hooks && hooks->tile_done) hooks->tile_done(view().rank, source);
  }

  bool stopped() const { return mismatch_.load(std::memory_order_acquire) || context.abort.raised(); }
  bool mismatched() const { return mismatch_.load(std::memory_order_acquire); }
  const std::string& mismatch_sentence() const { return mismatch_sentence_; }
  void set_mismatch(std::string sentence);  // entry role only
  // What the call's data are at fault in (MK_ERROR_DATA), the same on every rank; by one thread. The launch
  // goes on, without moving rows, until all have entered.
  // `rank_at_fault`: -1 when it is no rank's more than another's.
  void set_data_error(std::string sentence, int rank_at_fault = -1) {
    data_error_ = std::move(sentence);
    data_error_rank_ = rank_at_fault;
  }
  const std::string& data_error() const { return data_error_; }
  int data_error_rank() const { return data_error_rank_; }
  void set_all_entered();
  bool all_entered() const { return all_entered_.load(std::memory_order_acquire); }
  std::chrono::steady_clock::time_point entered_at() const { return entered_at_; }
  // By a role that waits while not all have entered: says who has not, once it is time to.
  void look_for_absent();

 private:
  uint64_t entry_epoch(int in_bank, int source) const;

  const Arena& arena_;
  const std::chrono::steady_clock::time_point begun_at_ = std::chrono::steady_clock::now();
  std::atomic<bool> has_looked_for_absent_{false};
  std::atomic<bool> mismatch_{false};
  std::string mismatch_sentence_;
  std::string data_error_;
  int data_error_rank_ = -1;
  std::atomic<bool> all_entered_{false};
  std::chrono::steady_clock::time_point entered_at_;
};

// A role's patience: it looks at what it has to do, and when there is nothing sleeps on the doorbell.
//   while (left) { waiter.look(); if (did something) waiter.progressed(); else if (!waiter.sleep(target))
//   return; }
class Waiter {
 public:
  Waiter(HostLaunch& launch, const char* role, HostTrack* track)
      : launch_(launch), role_(role), track_(track) {}

  void look() { ticket_ = launch_.rank.doorbell(); }
  void progressed() { since_ = std::chrono::steady_clock::now(); }
  // False: the role has to end (abort, mismatch, or the deadline, which this has then reported).
  bool sleep(const WaitTarget& target);
  // Hands a command to the proxy, waiting while the queue is full. False: the role has to end.
  bool put(int peer, uint64_t source, uint64_t target, size_t bytes, int signal);
  // Where this thread's spans go, null when no trace is taken.
  HostTrack* track() const { return track_; }

 private:
  HostLaunch& launch_;
  const char* role_;
  HostTrack* const track_;
  uint32_t ticket_ = 0;
  std::chrono::steady_clock::time_point since_ = std::chrono::steady_clock::now();
};

// Performs the items of a list, in their order as far as each can go: perform(item) is false while it cannot.
// Sleeps when none can, waiting for target_of(first item left). False: the role has to end.
template <class Item, class Perform, class TargetOf>
bool perform_all(Waiter& waiter, std::vector<Item>& items, const Perform& perform, const TargetOf& target_of) {
  while (!items.empty()) {
    waiter.look();
    if (std::erase_if(items, perform) > 0) {
      waiter.progressed();
    } else if (!waiter.sleep(target_of(items.front()))) {
      return false;
    }
  }
  return true;
}

using Role = std::pair<const char*, std::function<void(Waiter&)>>;

// The entry role: announces this launch to other nodes, passes on what arrives, compares, waits for all.
void run_entry_role(HostLaunch& launch, Waiter& waiter);

}  // namespace mk
