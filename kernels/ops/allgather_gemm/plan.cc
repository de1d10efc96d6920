// SPDX-License-Identifier: MIT
#include "plan.h"

#include "../../../transport/command.h"
#include "../../host/tile_gemm.h"
#include "../../plan.h"

namespace mk::allgather_gemm {

Schedule make_schedule(const GemmCall& call, const mk_plan_t& plan, const TopologyView& view) {
  return {view, call.m, travelling_columns(call), plan.chunk_rows, plan.tile_m, plan.num_chunks};
}

void count_bytes(const Schedule& schedule, mk_plan_t& plan) {
  const TopologyView& view = schedule.topology;
  const int64_t row = static_cast<int64_t>(schedule.row_bytes());
  for (int source = 0; source < view.nranks; ++source) {
    if (source != view.rank && !schedule.relays(source)) continue;
    plan.link_bytes += schedule.rows(source) * row * (view.local_nranks() - 1);
  }
  plan.network_bytes += schedule.rows(view.rank) * row * (view.num_nodes - 1);
}

Result<mk_plan_t> plan_host(const GemmCall& call, const TopologyView& view, int threads) {
  mk_plan_t plan = MK_PLAN_INIT;
  const int64_t max_rows = ceil_div(call.m, view.nranks);
  const int64_t row_bytes = travelling_columns(call) * 2;
  // Every (source, chunk) has a flag and a signal.
  const int max_chunks = std::min<int64_t>(
      {kMaxChunks, kFlagsPerBank / view.nranks, (kSignalsPerBank - kEntrySignals) / view.nranks});
  plan.tile_m = std::min(tuned(call.tuning.tile_m, TileGemm::kRows), TileGemm::kRows);
  plan.tile_n = std::min(tuned(call.tuning.tile_n, TileGemm::kColumns), TileGemm::kColumns);
  const Result<int32_t> chunk_rows = choose_chunk_rows(call, max_rows, row_bytes, plan.tile_m, max_chunks);
  if (!chunk_rows.ok()) return chunk_rows.status();
  plan.chunk_rows = chunk_rows.value();
  plan.num_chunks = std::max(1, num_chunks(max_rows, plan.chunk_rows));
  plan.chunk_bytes = plan.chunk_rows * row_bytes;
  plan.compute_ctas = tuned(call.tuning.compute_ctas, threads);
  plan.copy_ctas = 1;
  plan.send_ctas = view.num_nodes > 1 ? 1 : 0;
  plan.receive_ctas = view.num_nodes > 1 ? 1 : 0;
  const Schedule schedule = make_schedule(call, plan, view);
  plan.workspace_bytes = 2 * schedule.area_bytes();
  count_bytes(schedule, plan);
  return plan;
}

}  // namespace mk::allgather_gemm
