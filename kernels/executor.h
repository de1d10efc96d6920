// SPDX-License-Identifier: MIT
// What carries operator calls out: the host executor (roles as threads) or CUDA (roles as CTAs).
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "../lib/abort_token.h"
#include "../lib/exchange.h"
#include "../lib/topology.h"
#include "operator_call.h"
#include "trace.h"

namespace mk {

class Endpoint;
class SymmetricMemory;

// A block that a rank contributes to a host-collective step, and what others may learn from it while they wait.
enum class MeetingKind : uint32_t {
  prepare = 1,
  mem_alloc,
  mem_free,
  mem_register,
  mem_deregister,
  finalize,
  recover
};

struct Meeting {
  MeetingKind kind;
  uint64_t epoch;           // launches of that rank so far
  std::string description;  // what the rank is doing, for error sentences
};

// What an executor needs of the communicator it serves.
struct ExecutorContext {
  const Topology& topology;
  Exchange& exchange;
  AbortToken& abort;
  Endpoint* endpoint;  // null with one node
  mk_comm_config_t config;
  // Ranks outside this one's launch that wait in a host-collective step.
  std::function<std::optional<Meeting>(int peer)> peek;
  // Host-collective; ends a launch on whose shape ranks disagree: every rank comes here, agrees on the next
  // epoch and quiesces the network. Returns the sentence of the lowest rank.
  std::function<Result<std::string>(const std::string& sentence)> recover;
  // Records an asynchronous error; a fatal one raises the abort token.
  std::function<void(const mk_async_error_t& error, const std::string& sentence)> report;
  // Where user memory stands in symmetric memory: its offset, if [pointer, pointer + bytes) is inside.
  std::function<std::optional<uint64_t>(const void* pointer, size_t bytes)> symmetric_offset;
  std::function<std::byte*(int local_rank, uint64_t offset)> symmetric_peer;
  // The transport region of registered user memory: region id and offset, if [pointer, pointer + bytes) is
  // inside one.
  std::function<std::optional<std::pair<uint32_t, uint64_t>>(const void* pointer, size_t bytes)>
      registered_region;
};

class Executor {
 public:
  virtual ~Executor() = default;

  virtual mk_device_t device() const = 0;
  virtual int cuda_device() const = 0;
  virtual int num_threads() const = 0;

  // What a call would run with. Pure.
  virtual Result<mk_plan_t> plan(const OperatorCall& call) const = 0;
  virtual bool prepared(const OperatorCall& call) const = 0;
  // Allocates for calls up to `call`'s sizes. Collective: every rank with equal sizes.
  virtual Status prepare(const OperatorCall& call, Deadline deadline) = 0;
  virtual size_t workspace_bytes() const = 0;  // allocated so far
  // What prepare() allocates for a call is rounded up to a multiple of this. Equal on all ranks.
  virtual size_t workspace_granularity() const = 0;
  // Another symmetric memory of this executor's kind, for the user's allocations. Collective.
  virtual Result<std::unique_ptr<SymmetricMemory>> make_memory(Deadline deadline) = 0;

  // Enqueues a prepared call.
  virtual Status enqueue(const OperatorCall& call, mk_stream_t stream) = 0;
  // Is the stream being captured into a graph?
  virtual Result<bool> capturing(mk_stream_t stream) = 0;
  // Waits for what was enqueued. Ends by itself when the abort token is raised.
  virtual Status synchronize(mk_stream_t stream) = 0;

  virtual uint64_t epoch() const = 0;
  virtual void set_epoch(uint64_t epoch) = 0;  // only while nothing runs
  // Signals that this rank has sent to `peer` so far, and received from everyone; for recover.
  virtual uint64_t signals_sent(int peer) const = 0;
  virtual uint64_t signals_received() const = 0;
  virtual void rebase_signals() = 0;  // what has arrived so far belongs to the past

  virtual size_t flight_record(mk_flight_entry_t* entries, size_t capacity) const = 0;
  // Records launches from now on, at most max_spans spans a track (0: the executor's choice).
  virtual Status start_trace(int64_t max_spans) = 0;
  // Waits for what was enqueued, as synchronize does, and returns what was recorded. Recording goes on.
  virtual Result<Trace> collect_trace() = 0;
  virtual void stop_trace() = 0;
  // Wakes waiting roles so that they look at the abort token, or at peek(). Any thread.
  virtual void wake() = 0;
  // After the abort token is raised: waits until nothing runs, false when `deadline` passed first.
  virtual bool wait_idle(Deadline deadline) = 0;
  // Ends the executor's threads. Its memory stays until destruction: the network may still write to it, until
  // the endpoint is gone.
  virtual void stop() {}
};

Result<std::unique_ptr<Executor>> make_host_executor(ExecutorContext context, Deadline deadline);
// What tells the GPU that a rank would use (`ordinal`; -1: the current one) from others of its host; empty
// where there is none that the library can use.
std::string cuda_device_identity(int ordinal);
// What the network must know of the GPU that a rank uses (`ordinal`; -1: the current one).
struct GpuNetworkTraits {
  std::string pci_bus_id;                // as sysfs spells it
  std::function<Status()> flush_writes;  // EndpointOptions::flush_writes
};
Result<GpuNetworkTraits> cuda_network_traits(int ordinal);
// MK_ERROR_UNSUPPORTED with the reason when the library was built without CUDA, or the machine has no usable
// GPU.
Result<std::unique_ptr<Executor>> make_cuda_executor(ExecutorContext context, Deadline deadline);

}  // namespace mk
