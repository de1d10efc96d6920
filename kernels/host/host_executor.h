// SPDX-License-Identifier: MIT
// Carries launches out one after another on a thread of its own, each launch's roles as threads.
#pragma once

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "../executor.h"
#include "../flight_recorder.h"
#include "host_operator.h"
#include "host_trace.h"
#include "role_pool.h"

namespace mk {

class HostExecutor : public Executor {
 public:
  HostExecutor(ExecutorContext context, std::unique_ptr<HostRank> rank, int num_threads);
  ~HostExecutor() override;

  mk_device_t device() const override { return MK_DEVICE_HOST; }
  int cuda_device() const override { return -1; }
  int num_threads() const override { return num_threads_; }
  Result<mk_plan_t> plan(const OperatorCall& call) const override;
  bool prepared(const OperatorCall& call) const override { return find_prepared(call) != nullptr; }
  Status prepare(const OperatorCall& call, Deadline deadline) override;
  size_t workspace_bytes() const override { return rank_->memory().size(); }
  size_t workspace_granularity() const override { return rank_->memory().granularity(); }
  Result<std::unique_ptr<SymmetricMemory>> make_memory(Deadline deadline) override {
    return make_host_symmetric_memory(context_.topology, context_.exchange, context_.abort, deadline);
  }
  Status enqueue(const OperatorCall& call, mk_stream_t stream) override;
  Result<bool> capturing(mk_stream_t) override { return false; }
  Status synchronize(mk_stream_t stream) override;
  uint64_t epoch() const override;
  void set_epoch(uint64_t epoch) override;
  uint64_t signals_sent(int peer) const override;
  uint64_t signals_received() const override;
  void rebase_signals() override;
  size_t flight_record(mk_flight_entry_t* entries, size_t capacity) const override {
    return flight_.copy(entries, capacity);
  }
  Status start_trace(int64_t max_spans) override;
  Result<Trace> collect_trace() override;
  void stop_trace() override;
  void wake() override { rank_->ring(); }
  bool wait_idle(Deadline deadline) override;
  void stop() override;

 private:
  // Sizes that calls may have, and the arena that they then use.
  struct Prepared {
    OperatorCall maxima;
    size_t arena;
  };
  struct Queued {
    OperatorCall call;
    mk_plan_t plan;
    size_t arena;
  };

  const Prepared* find_prepared(const OperatorCall& call) const;
  void serve();
  void run(const Queued& launch, uint64_t epoch);
  void finish(HostLaunch& launch, bool ran);
  bool run_roles(HostLaunch& launch, HostTrace* trace);
  bool drain_puts(HostLaunch& launch);

  const ExecutorContext context_;
  const std::unique_ptr<HostRank> rank_;
  const int num_threads_;
  std::vector<Prepared> prepared_;  // changed only while nothing is enqueued
  std::deque<Arena> arenas_;        // stable addresses: launches keep references
  RolePool pool_;
  FlightRecorder flight_;
  std::unique_ptr<HostTrace> trace_;
  std::atomic<HostTrace*> running_trace_{nullptr};  // what launches record into

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Queued> queue_;
  uint64_t epoch_ = 0;  // launches started
  bool running_ = false;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace mk
