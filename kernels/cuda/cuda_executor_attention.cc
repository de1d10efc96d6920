// SPDX-License-Identifier: MIT
// Ring attention on a GPU rank, alone or one of several.
#include <algorithm>

#include "kernels/cuda/cuda_error.h"
#include "kernels/cuda/cuda_executor.h"
#include "kernels/cuda/ring_attention_backward_launch.h"
#include "kernels/cuda/ring_attention_launch.h"

namespace mk {
namespace {

bool is_backward(const RingAttentionCall& call) { return call.op == MK_OPERATOR_RING_ATTENTION_BACKWARD; }

}  // namespace

// A forward call's. Of packed sequences it holds an address.
Result<RingAttentionPlan> CudaExecutor::planned_attention(const RingAttentionCall& call) const {
  if (const RingAttentionPlan* known = planned_attention_.find(call)) return *known;
  const Result<RingAttentionPlan> plan =
      ring_attention_plan(call, context_.topology.rank, nranks(), device_rank_sms(), nodes());
  if (plan.ok() && call.num_sequences == 0) planned_attention_.insert(call, plan.value());
  return plan;
}

Result<CudaExecutor::AttentionSizes> CudaExecutor::attention_sizes(const RingAttentionCall& call) const {
  if (is_backward(call)) {
    const auto plan =
        ring_attention_backward_plan(call, context_.topology.rank, nranks(), device_rank_sms(), nodes());
    if (!plan.ok()) return plan.status();
    return AttentionSizes{plan.value().plan, plan.value().area_bytes};
  }
  const auto plan = planned_attention(call);
  if (!plan.ok()) return plan.status();
  return AttentionSizes{plan.value().plan, plan.value().area_bytes};
}

const CudaRank::Arena* CudaExecutor::find_arena(const RingAttentionCall& call, int64_t bank_bytes) const {
  for (const PreparedAttention& candidate : prepared_attention_) {
    if (static_cast<int64_t>(candidate.arena->bank_bytes) >= bank_bytes && covers(candidate.maxima, call))
      return candidate.arena;
  }
  return nullptr;
}

Result<mk_plan_t> CudaExecutor::plan_attention(const RingAttentionCall& call) const {
  const Result<AttentionSizes> chosen = attention_sizes(call);
  if (!chosen.ok()) return chosen.status();
  mk_plan_t plan = chosen.value().plan;
  plan.prepared = find_arena(call, chosen.value().area_bytes) != nullptr ? 1 : 0;
  return plan;
}

Status CudaExecutor::prepare_attention(const RingAttentionCall& call, Deadline deadline) {
  const Result<AttentionSizes> chosen = attention_sizes(call);
  if (!chosen.ok()) return chosen.status();
  bool& is_loaded = attention_kernels_loaded_[is_backward(call) ? 1 : 0];
  if (!is_loaded) {
    const cudaError_t error = is_backward(call) ? ring_attention_backward_prepare(nodes() != nullptr)
                                                : ring_attention_prepare(nodes() != nullptr);
    MK_RETURN_IF_ERROR(cuda_error(error, "loading the kernels"));
    is_loaded = true;
  }
  const Result<const CudaRank::Arena*> arena = arena_for(chosen.value().area_bytes, deadline);
  if (!arena.ok()) return arena.status();
  prepared_attention_.push_back({call, arena.value()});
  return {};
}

template <class Plan, class Launch>
Status CudaExecutor::enqueue_attention_planned(const RingAttentionCall& call, const Result<Plan>& plan,
                                               Launch&& launch, bool is_captured) {
  if (!plan.ok()) return plan.status();
  CudaRank& rank = *device_rank();
  RankComm comm = rank.comm(*find_arena(call, plan.value().area_bytes));
  // cu_seqlens is in device memory: the kernel adds its hash.
  RingAttentionCall without_hash = call;
  without_hash.cu_seqlens = nullptr;
  comm.entry = make_entry(without_hash, 0);
  if (trace_) comm.trace = trace_->buffer();
  if (!is_captured) comm.ticket = rank.next_ticket();
  const std::array<int64_t, 4> shape = flight_shape(call);
  std::copy(shape.begin(), shape.end(), comm.flight_shape);
  const cudaError_t error = launch(plan.value(), comm);
  if (error == cudaSuccess && !is_captured) rank.count_launch();
  return cuda_error(error, operator_name(call.op));
}

Status CudaExecutor::enqueue_attention(const RingAttentionCall& call, cudaStream_t stream, bool is_captured) {
  if (is_backward(call)) {
    return enqueue_attention_planned(
        call, ring_attention_backward_plan(call, context_.topology.rank, nranks(), device_rank_sms(), nodes()),
        [&](const RingAttentionBackwardPlan& plan, const RankComm& comm) {
          return ring_attention_backward_launch(call, plan, comm, stream);
        },
        is_captured);
  }
  return enqueue_attention_planned(
      call, planned_attention(call),
      [&](const RingAttentionPlan& plan, const RankComm& comm) {
        return ring_attention_launch(call, plan, comm, stream);
      },
      is_captured);
}

}  // namespace mk
