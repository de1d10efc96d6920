// SPDX-License-Identifier: MIT
// Operators on a GPU, one persistent kernel a call: the plain product for a communicator of one rank, a kernel
// that works with its peers' otherwise.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "kernels/cuda/call_cache.h"
#include "kernels/cuda/cuda_rank.h"
#include "kernels/cuda/cuda_trace.h"
#include "kernels/cuda/moe_plan.h"
#include "kernels/cuda/rank_gemm_launch.h"
#include "kernels/cuda/ring_attention_plan.h"
#include "kernels/executor.h"
#include "kernels/flight_recorder.h"
#include "kernels/gemm/gemm.h"

namespace mk {

class CudaExecutor : public Executor {
 public:
  CudaExecutor(ExecutorContext context, int device, int num_sms);
  ~CudaExecutor() override;
  // Collective.
  Status set_up(Deadline deadline);

  mk_device_t device() const override { return MK_DEVICE_CUDA; }
  int cuda_device() const override { return device_; }
  int num_threads() const override { return 0; }
  Result<mk_plan_t> plan(const OperatorCall& call) const override;
  bool prepared(const OperatorCall& call) const override;
  Status prepare(const OperatorCall& call, Deadline deadline) override;
  size_t workspace_bytes() const override;
  size_t workspace_granularity() const override;
  Result<std::unique_ptr<SymmetricMemory>> make_memory(Deadline deadline) override;
  Status enqueue(const OperatorCall& call, mk_stream_t stream) override;
  Result<bool> capturing(mk_stream_t stream) override;
  Status synchronize(mk_stream_t stream) override;
  uint64_t epoch() const override { return rank_ ? rank_->epoch() : epoch_.load(); }
  void set_epoch(uint64_t epoch) override { epoch_ = epoch; }
  uint64_t signals_sent(int) const override { return 0; }
  uint64_t signals_received() const override { return 0; }
  void rebase_signals() override {}
  size_t flight_record(mk_flight_entry_t* entries, size_t capacity) const override {
    return rank_ ? rank_->flight_record(entries, capacity) : flight_.copy(entries, capacity);
  }
  Status start_trace(int64_t max_spans) override;
  Result<Trace> collect_trace() override;
  void stop_trace() override;
  void wake() override;
  bool wait_idle(Deadline deadline) override;

 private:
  // Sizes that calls may have, and the arena that they then use.
  struct Prepared {
    GemmCall maxima;
    const CudaRank::Arena* arena;
  };
  struct PreparedMoe {
    MoeCall maxima;
    const CudaRank::Arena* arena;
  };
  // What it looks at of a plan of either direction.
  struct AttentionSizes {
    mk_plan_t plan;
    int64_t area_bytes;
  };
  struct PreparedAttention {
    RingAttentionCall maxima;
    const CudaRank::Arena* arena;
  };

  // What follows from a call, whatever its addresses.
  struct Planned {
    GemmPlan alone;                          // one rank
    RankGemmPlan with_peers;                 // several,
    const CudaRank::Arena* arena = nullptr;  // where that has been prepared,
    std::unique_ptr<RankGemmLaunch> launch;  // once it has been enqueued
  };

  int nranks() const { return context_.topology.nranks; }
  // Who is where, when the ranks are on several nodes; else null.
  const TopologyView* nodes() const { return rank_ ? rank_->nodes() : nullptr; }
  size_t max_workspace_bytes() const;
  int num_sms_of(const GemmCall& call) const;  // one rank
  Result<Planned*> planned(const GemmCall& call) const;
  const CudaRank::Arena* find_arena(const GemmCall& call, int64_t bank_bytes) const;
  Status check_stream(mk_stream_t stream, bool* is_captured) const;
  CudaRank* device_rank() const;  // null: there is none yet
  int device_rank_sms() const;
  const CudaRank::Arena* find_arena(const MoeCall& call, int64_t bank_bytes) const;
  Result<MoePlan> planned_moe(const MoeCall& call) const;
  Result<mk_plan_t> plan_moe(const MoeCall& call) const;
  bool prepared_for_moe(const MoeCall& call) const;
  Status prepare_moe(const MoeCall& call, Deadline deadline);
  Status enqueue_moe(const MoeCall& call, cudaStream_t stream, bool is_captured);
  const CudaRank::Arena* find_arena(const RingAttentionCall& call, int64_t bank_bytes) const;
  Result<RingAttentionPlan> planned_attention(const RingAttentionCall& call) const;
  Result<AttentionSizes> attention_sizes(const RingAttentionCall& call) const;
  Result<mk_plan_t> plan_attention(const RingAttentionCall& call) const;
  Status prepare_attention(const RingAttentionCall& call, Deadline deadline);
  Status enqueue_attention(const RingAttentionCall& call, cudaStream_t stream, bool is_captured);
  template <class Plan, class Launch>
  Status enqueue_attention_planned(const RingAttentionCall& call, const Result<Plan>& plan, Launch&& launch,
                                   bool is_captured);
  Result<const CudaRank::Arena*> arena_for(int64_t area_bytes, Deadline deadline);
  Status prepare_packets(const GemmCall& call, Deadline deadline);
  Status launch(const OperatorCall& call, uint64_t epoch, cudaStream_t stream, bool is_captured);
  Status count_clusters();
  Status prepare_alone();
  Status enqueue_alone(const OperatorCall& call, cudaStream_t stream, bool is_captured);
  Status enqueue_with_peers(const GemmCall& call, cudaStream_t stream, bool is_captured);
  LaunchDetails details_of(const PeerOutput& output, bool is_captured) const;
  Status launch_alone(const GemmCall& call, uint64_t epoch, cudaStream_t stream);
  // Has everything enqueued ended? An error of the device ends it, too.
  cudaError_t query_launches() const;

  const ExecutorContext context_;
  const int device_;
  const int num_sms_;  // that a launch may use
  const int device_sms_;
  const double memory_bytes_per_us_;
  cudaEvent_t last_launch_ = nullptr;  // recorded with one rank only
  // Of this communicator's ranks, nodes and SMs, which stay what they are. A communicator is used by one thread
  // at a time.
  mutable CallCache<GemmCall, Planned> planned_;
  GemmClusterLimits cluster_limits_;  // of the device; what ranks have agreed on, rank_ knows
  // One rank.
  void* workspace_ = nullptr;
  std::atomic<uint64_t> epoch_{0};
  FlightRecorder flight_;
  std::unique_ptr<CudaTrace> trace_;                      // under way
  std::vector<std::unique_ptr<CudaTrace>> ended_traces_;  // that captured launches still point to
  // Several.
  std::unique_ptr<CudaRank> rank_;
  bool kernels_loaded_ = false;
  std::deque<CudaRank::Arena> arenas_;  // stable addresses
  std::vector<Prepared> prepared_;
  std::optional<CudaRank::Arena> packets_;  // for nothing but tagged packets; reductions inside a node
  // Experts and attention, with one rank, too.
  std::unique_ptr<CudaRank> lone_rank_owner_;
  std::atomic<CudaRank*> lone_rank_{nullptr};
  bool moe_kernels_loaded_ = false;
  std::vector<PreparedMoe> prepared_moe_;
  bool attention_kernels_loaded_[2] = {};  // forward, backward
  std::vector<PreparedAttention> prepared_attention_;
  mutable CallCache<RingAttentionCall, RingAttentionPlan> planned_attention_;  // forward
};

}  // namespace mk
