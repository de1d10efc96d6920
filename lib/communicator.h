// SPDX-License-Identifier: MIT
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "../kernels/executor.h"
#include "../transport/endpoint.h"
#include "abort_token.h"
#include "bootstrap.h"
#include "symmetric_heap.h"
#include "symmetric_memory.h"
#include "topology.h"

namespace mk {

// One rank of a communicator: ties bootstrap, memory, transport and executor together. Checked arguments only;
// the C interface (api.cc) checks them.
class Communicator {
 public:
  Communicator(int nranks, int rank, const mk_comm_config_t& config);
  ~Communicator();

  Status initialise(const mk_unique_id_t& id);
  Status finalize();
  // Ends what still runs and frees everything but the object itself. Not while a call is inside.
  void tear_down();
  // Any thread, any moment.
  void abort();

  // One call at a time: false while another thread is inside.
  bool enter() { return !inside_.exchange(true, std::memory_order_acquire); }
  void leave() { inside_.store(false, std::memory_order_release); }
  // Inside: there is nothing behind the handle any more; another thread, which was inside before, has seen to
  // that.
  bool torn_down() const { return torn_down_; }
  // The status that every call returns now: that of the error which ended the communicator, or of finalize.
  Status usable() const;

  // A stream that this communicator's device cannot take is an invalid argument.
  Status check_stream(mk_stream_t stream) const;

  mk_comm_info_t info() const;
  Executor& executor() { return *executor_; }
  int rank() const { return rank_; }
  int nranks() const { return nranks_; }

  Status prepare(const OperatorCall& call);
  Status enqueue(const OperatorCall& call, mk_stream_t stream, bool may_prepare);
  Status synchronize(mk_stream_t stream);
  Result<size_t> workspace_needed(const OperatorCall& call) const;
  // Library memory of this rank, as max_workspace_bytes counts it.
  size_t workspace_bytes() const;

  Result<void*> mem_alloc(size_t bytes);
  Status mem_free(void* pointer);
  Result<uint64_t> mem_register(void* pointer, size_t bytes);
  Status mem_deregister(uint64_t handle);

  mk_async_error_t async_error() const;
  Status clear_async_error();
  size_t flight_record(mk_flight_entry_t* entries, size_t capacity) const;
  Status start_trace(int64_t max_spans);
  // `path` null: throws the trace away.
  Status stop_trace(const char* path);
  // What it owns of the network between nodes; nullptr with one node.
  const Endpoint* endpoint() const { return endpoint_.get(); }
  void set_last_error(const std::string& sentence);
  std::string last_error() const;

 private:
  struct Registered {
    uint64_t handle;
    std::byte* base;
    size_t bytes;
    uint32_t region;
  };
  struct Allocation {
    size_t offset;
    size_t bytes;
  };

  Deadline step_deadline() const { return Deadline::after(std::chrono::milliseconds(config_.init_timeout_ms)); }
  std::string config_text() const;
  Status set_up(const mk_unique_id_t& id);
  Status join_job(const mk_unique_id_t& id, Deadline deadline);
  Status find_topology(Deadline deadline);
  Status choose_device(const std::vector<std::string>& hosts, const std::vector<std::string>& gpus);
  Status make_endpoint(Deadline deadline);
  Status make_executor(Deadline deadline);
  ExecutorContext executor_context();

  // The first step of every host-collective call: all ranks say what they are about to do; if that differs,
  // every rank gets MK_ERROR_MISMATCH naming two of them. `payload` must be equal everywhere, `what` describes
  // it.
  Status meet(MeetingKind kind, const std::string& what, std::span<const std::byte> payload, Deadline deadline);
  Result<std::string> recover(const std::string& sentence);
  Status quiesce(uint64_t expected_signals, uint64_t epoch, Deadline deadline);
  void await_verdict() const;
  // An exchange that failed leaves ranks in different steps: the communicator ends.
  Status fatal(Status status);
  // May the library's memory grow by `bytes`, rounded up to `granularity`?
  bool workspace_has_room(size_t bytes, size_t granularity) const;
  Status grow_user_memory(size_t bytes, Deadline deadline);

  std::optional<Meeting> peek(int peer);
  void report(const mk_async_error_t& error, const std::string& sentence);
  Status asynchronous_status() const;
  void on_abort();

  std::optional<uint64_t> symmetric_offset(const void* pointer, size_t bytes) const;
  std::optional<std::pair<uint32_t, uint64_t>> registered_region(const void* pointer, size_t bytes) const;

  const int nranks_;
  const int rank_;
  mk_comm_config_t config_;
  std::vector<int32_t> emulated_nodes_;
  std::string transport_;
  std::atomic<bool> inside_{false};
  bool torn_down_ = false;  // of whoever is inside
  std::atomic<bool> finalized_{false};
  std::atomic<bool> closing_{false};  // all ranks have agreed to finalize

  AbortToken abort_;
  Topology topology_;
  // Guards the pointers below against abort() from another thread; the threads behind them are stopped outside
  // it.
  mutable std::mutex parts_mutex_;
  std::unique_ptr<Bootstrap> bootstrap_;
  std::unique_ptr<Endpoint> endpoint_;
  std::unique_ptr<Executor> executor_;

  // Read by launches, changed only while nothing runs.
  std::unique_ptr<SymmetricMemory> user_memory_;
  SymmetricHeap heap_;
  std::vector<Allocation> allocations_;
  std::vector<Registered> registered_;
  const uint64_t instance_;  // of this process' communicators
  uint32_t last_memory_handle_ = 0;
  int32_t prepared_bits_ = 0;
  bool tracing_ = false;

  mutable std::mutex error_mutex_;
  mk_async_error_t async_error_ = MK_ASYNC_ERROR_INIT;
  std::string async_sentence_;
  std::string last_error_;
};

// Does this error leave the communicator usable (mkernel.h, Status)?
bool is_fatal(mk_status_t status);

}  // namespace mk
