// SPDX-License-Identifier: MIT
// What a GPU rank of a communicator of several ranks keeps between launches: library memory that its peers
// write to, the launch state, the mailbox that the kernels share with the host, and the thread that reads it;
// between nodes the GPU's end of the network.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "kernels/cuda/mapped_pages.h"
#include "kernels/device/rank_comm.h"
#include "kernels/executor.h"
#include "kernels/gemm/gemm_plan.h"
#include "kernels/topology_arrays.h"
#include "lib/symmetric_memory.h"

namespace mk {

class CudaRank {
 public:
  // Two banks of receive areas.
  struct Arena {
    size_t offset;
    size_t bank_bytes;
    uint32_t region = 0;  // of the transport, between nodes
  };

  // What launches may use of a device.
  struct Room {
    int num_sms = 0;
    GemmClusterLimits clusters;
  };

  // Allocates and maps the control blocks. Collective; `device` is current.
  static Result<std::unique_ptr<CudaRank>> make(const ExecutorContext& context, int device, const Room& room,
                                                Deadline deadline);
  ~CudaRank();

  // Appends an arena. Collective.
  Result<Arena> add_arena(size_t bank_bytes, Deadline deadline);
  size_t workspace_bytes() const {
    return memory_->size() + sizeof(LaunchState) + room_.num_sms * STAGING_BYTES +
           (network_ != nullptr ? sizeof(NetworkState) : 0);
  }
  size_t workspace_granularity() const { return memory_->granularity(); }
  // Who is where, when the ranks are on several nodes; else null.
  const TopologyView* nodes() const { return context_.endpoint != nullptr ? &arrays_.view() : nullptr; }
  // CTAs of a launch, and the clusters of these that run at a time: the fewest that any rank can have, because
  // plans follow from it.
  int num_sms() const { return room_.num_sms; }
  const GemmClusterLimits& cluster_limits() const { return room_.clusters; }

  // The parameter of a launch, complete but for shape, entry, trace and ticket.
  RankComm comm(const Arena& arena) const;
  // The ticket of a launch that is not captured; once it has been enqueued it is to be counted.
  uint64_t next_ticket() const { return num_enqueued_.load(std::memory_order_relaxed) + 1; }
  void count_launch() { num_enqueued_.fetch_add(1, std::memory_order_release); }
  // Launches that have completed, as the GPU says, or said when it last answered.
  uint64_t epoch() const;
  // Have all counted launches ended, and is no captured one inside?
  bool idle() const;
  // Tells the kernels to end.
  void set_abort();
  // Reports what the kernels have written since the last look. Any thread.
  void look();
  size_t flight_record(mk_flight_entry_t* entries, size_t capacity) const;

 private:
  CudaRank(const ExecutorContext& context, int device, const Room& room)
      : context_(context),
        arrays_(context.topology),
        order_(make_rank_order(arrays_.view())),
        room_(room),
        device_(device) {
    room_.num_sms = std::min(room_.num_sms, PartialsLayout::MAX_CTAS);  // each CTA has a place in LaunchEnds
  }
  Status allocate(Deadline deadline);
  Status connect_network(Deadline deadline);
  Status prime(uint32_t region, Deadline deadline);
  Status post_primes(uint32_t region, uint64_t& head, Deadline deadline);
  Status agree_on_room(Deadline deadline);
  // The GPU's own; as they were last known while it does not answer, being busy or lost.
  LaunchEnds ends() const;
  // Has what copy() enqueues on copies_ arrived in the mailbox? Under copies_mutex_.
  template <class Copy>
  bool ask_gpu(Copy&& copy) const;
  cudaError_t await_copy(Deadline deadline) const;
  void report(const DeviceError& error);
  void watch();
  // By the watcher: says whom a launch waits for, once it has for long.
  void look_for_absent();

  const ExecutorContext& context_;
  const TopologyArrays arrays_;
  const RankOrder order_;
  Room room_;
  std::unique_ptr<SymmetricMemory> memory_;
  NetworkState* network_ = nullptr;
  std::unique_ptr<MappedPages> fifo_;
  std::unique_ptr<MappedPages> counters_;
  uint32_t fifo_capacity_ = 0;
  uint32_t control_region_ = 0;
  uint64_t num_primes_due_ = 0;  // first puts of all regions so far that come to this rank
  LaunchState* state_ = nullptr;
  std::byte* partials_ = nullptr;
  HostMailbox* mailbox_ = nullptr;         // as the host addresses it
  HostMailbox* device_mailbox_ = nullptr;  // as the device does
  const int device_;
  uint64_t birth_ns_ = 0;
  cudaStream_t copies_ = nullptr;  // of what the host asks of launches, to mailbox_
  mutable std::mutex copies_mutex_;
  mutable bool is_copying_ = false;
  mutable LaunchEnds ends_{};
  std::atomic<uint64_t> num_enqueued_{0};
  std::atomic<bool> has_overlapped_{false};  // launches have: they may have ended as one

  std::mutex look_mutex_;
  std::mutex stop_mutex_;
  std::condition_variable stopping_;
  bool stop_ = false;
  // The watcher's: the last launch that has begun, when it was first seen, and whether whom it waits for has
  // been looked at.
  uint64_t watched_epoch_ = 0;
  std::chrono::steady_clock::time_point watched_since_;
  bool has_looked_for_absent_ = false;
  std::thread watcher_;
};

}  // namespace mk
