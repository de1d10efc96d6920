// SPDX-License-Identifier: MIT
#include "plan.h"

#include "../allgather_gemm/plan.h"
#include "../gemm_reduce_scatter/plan.h"

namespace mk::gemm_allreduce {

Schedule make_schedule(const GemmCall& call, const mk_plan_t& plan, const TopologyView& view) {
  const int64_t half_words = call.n * element_bytes(call.out_dtype) / 2;
  return {gemm_reduce_scatter::make_schedule(call, plan, view),
          {view, call.m, half_words, plan.chunk_rows, plan.tile_m, plan.num_chunks}};
}

Result<mk_plan_t> plan_host(const GemmCall& call, const TopologyView& view, int threads) {
  if (call.tuning.algorithm == MK_ALGORITHM_ONE_SHOT) {
    return Status(
        MK_ERROR_UNSUPPORTED,
        "mk_gemm_allreduce: MK_ALGORITHM_ONE_SHOT is not built for the host executor; use MK_ALGORITHM_AUTO "
        "or _TWO_SHOT");
  }
  Result<mk_plan_t> chosen = gemm_reduce_scatter::plan_chunks(
      call, view, threads, gemm_reduce_scatter::flags_a_chunk(view) + view.nranks,
      view.num_nodes + view.nranks);
  if (!chosen.ok()) return chosen;
  mk_plan_t& plan = chosen.value();
  plan.algorithm = MK_ALGORITHM_TWO_SHOT;
  plan.copy_ctas = 1;
  plan.send_ctas = view.num_nodes > 1 ? 1 : 0;
  plan.receive_ctas = view.num_nodes > 1 ? 1 : 0;
  const Schedule schedule = make_schedule(call, plan, view);
  plan.workspace_bytes = 2 * schedule.area_bytes();
  gemm_reduce_scatter::count_bytes(schedule.reduce, plan);
  allgather_gemm::count_bytes(schedule.gather, plan);
  return chosen;
}

}  // namespace mk::gemm_allreduce
