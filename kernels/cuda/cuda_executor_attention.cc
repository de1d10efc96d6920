// SPDX-License-Identifier: MIT
// Ring attention on a GPU rank, alone or one of several.
#include <algorithm>

#include "kernels/cuda/cuda_error.h"
#include "kernels/cuda/cuda_executor.h"
#include "kernels/cuda/ring_attention_launch.h"

namespace mk {

const CudaRank::Arena* CudaExecutor::find_arena(const RingAttentionCall& call, int64_t bank_bytes) const {
  for (const PreparedAttention& candidate : prepared_attention_) {
    if (static_cast<int64_t>(candidate.arena->bank_bytes) >= bank_bytes && covers(candidate.maxima, call))
      return candidate.arena;
  }
  return nullptr;
}

Result<mk_plan_t> CudaExecutor::plan_attention(const RingAttentionCall& call) const {
  const Result<RingAttentionPlan> chosen =
      ring_attention_plan(call, context_.topology.rank, nranks(), device_rank_sms());
  if (!chosen.ok()) return chosen.status();
  mk_plan_t plan = chosen.value().plan;
  plan.prepared = find_arena(call, chosen.value().area_bytes) != nullptr ? 1 : 0;
  return plan;
}

Status CudaExecutor::prepare_attention(const RingAttentionCall& call, Deadline deadline) {
  const Result<RingAttentionPlan> chosen =
      ring_attention_plan(call, context_.topology.rank, nranks(), device_rank_sms());
  if (!chosen.ok()) return chosen.status();
  if (!attention_kernels_loaded_) {
    MK_RETURN_IF_ERROR(cuda_error(ring_attention_prepare(), "loading the kernels"));
    attention_kernels_loaded_ = true;
  }
  const Result<const CudaRank::Arena*> arena = arena_for(chosen.value().area_bytes, deadline);
  if (!arena.ok()) return arena.status();
  prepared_attention_.push_back({call, arena.value()});
  return {};
}

Status CudaExecutor::enqueue_attention(const RingAttentionCall& call, cudaStream_t stream, bool is_captured) {
  const Result<RingAttentionPlan> plan =
      ring_attention_plan(call, context_.topology.rank, nranks(), device_rank_sms());
  if (!plan.ok()) return plan.status();
  CudaRank& rank = *device_rank();
  RankComm comm = rank.comm(*find_arena(call, plan.value().area_bytes));
  comm.entry = make_entry(call, 0);
  if (trace_) comm.trace = trace_->buffer();
  if (!is_captured) comm.ticket = rank.next_ticket();
  const std::array<int64_t, 4> shape = flight_shape(call);
  std::copy(shape.begin(), shape.end(), comm.flight_shape);
  const cudaError_t error = ring_attention_launch(call, plan.value(), comm, stream);
  if (error == cudaSuccess && !is_captured) rank.count_launch();
  return cuda_error(error, operator_name(call.op));
}

}  // namespace mk
