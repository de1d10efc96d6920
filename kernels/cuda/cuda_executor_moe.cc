// SPDX-License-Identifier: MIT
// The mixture-of-experts operators on a GPU rank, alone or one of several.
#include <algorithm>

#include "kernels/cuda/cuda_error.h"
#include "kernels/cuda/cuda_executor.h"
#include "kernels/cuda/moe_launch.h"

namespace mk {

// What a combine needs depends on its data: the largest arena. A dispatch says what it needs.
const CudaRank::Arena* CudaExecutor::find_arena(const MoeCall& call, int64_t bank_bytes) const {
  const CudaRank::Arena* found = nullptr;
  for (const PreparedMoe& candidate : prepared_moe_) {
    if (static_cast<int64_t>(candidate.arena->bank_bytes) < bank_bytes || !covers(candidate.maxima, call))
      continue;
    if (found == nullptr || found->bank_bytes < candidate.arena->bank_bytes) found = candidate.arena;
  }
  return found;
}

Result<MoePlan> CudaExecutor::planned_moe(const MoeCall& call) const {
  return moe_plan(call, nranks(), device_rank_sms(), nodes(), memory_bytes_per_us_);
}

Result<mk_plan_t> CudaExecutor::plan_moe(const MoeCall& call) const {
  const Result<MoePlan> chosen = planned_moe(call);
  if (!chosen.ok()) return chosen.status();
  mk_plan_t plan = chosen.value().plan;
  plan.prepared = prepared_for_moe(call) ? 1 : 0;
  return plan;
}

bool CudaExecutor::prepared_for_moe(const MoeCall& call) const {
  const Result<MoePlan> chosen = planned_moe(call);
  return chosen.ok() && find_arena(call, chosen.value().area_bytes) != nullptr;
}

Status CudaExecutor::prepare_moe(const MoeCall& call, Deadline deadline) {
  const Result<MoePlan> chosen = planned_moe(call);
  if (!chosen.ok()) return chosen.status();
  if (!moe_kernels_loaded_) {
    MK_RETURN_IF_ERROR(cuda_error(moe_prepare(nodes() != nullptr), "loading the kernels"));
    moe_kernels_loaded_ = true;
  }
  const Result<const CudaRank::Arena*> arena = arena_for(chosen.value().area_bytes, deadline);
  if (!arena.ok()) return arena.status();
  prepared_moe_.push_back({call, arena.value()});
  return {};
}

Status CudaExecutor::enqueue_moe(const MoeCall& call, cudaStream_t stream, bool is_captured) {
  const Result<MoePlan> plan = planned_moe(call);
  if (!plan.ok()) return plan.status();
  RankComm comm = device_rank()->comm(*find_arena(call, plan.value().area_bytes));
  comm.entry = make_entry(call, 0);
  if (trace_) comm.trace = trace_->buffer();
  if (!is_captured) comm.ticket = device_rank()->next_ticket();
  const std::array<int64_t, 4> shape = flight_shape(call);
  std::copy(shape.begin(), shape.end(), comm.flight_shape);
  const cudaError_t error = moe_launch(call, plan.value(), comm, stream);
  if (error == cudaSuccess && !is_captured) device_rank()->count_launch();
  return cuda_error(error, operator_name(call.op));
}

}  // namespace mk
