// SPDX-License-Identifier: MIT
#include "plan.h"

#include "../../../transport/command.h"
#include "../../host/tile_gemm.h"
#include "../../plan.h"

namespace mk::gemm_reduce_scatter {
namespace {

int max_local_nranks(const TopologyView& view) {
  int largest = 0;
  for (int node = 0; node < view.num_nodes; ++node) largest = std::max(largest, view.node_nranks(node));
  return largest;
}

}  // namespace

Schedule make_schedule(const GemmCall& call, const mk_plan_t& plan, const TopologyView& view) {
  return {view,
          call.m,
          call.n,
          plan.chunk_rows,
          plan.tile_m,
          plan.num_chunks,
          max_local_nranks(view),
          element_bytes(call.comm_dtype)};
}

void count_bytes(const Schedule& schedule, mk_plan_t& plan) {
  const TopologyView& view = schedule.topology;
  const int64_t row = static_cast<int64_t>(schedule.row_bytes());
  for (int owner = 0; owner < view.nranks; ++owner) {
    if (schedule.reducer(owner, view.node()) != view.rank) {
      plan.link_bytes += schedule.rows(owner) * row;
    } else if (owner != view.rank) {
      plan.network_bytes += schedule.rows(owner) * row;
    }
  }
}

Result<mk_plan_t> plan_chunks(const GemmCall& call, const TopologyView& view, int threads, int flags_per_chunk,
                              int signals_per_chunk) {
  mk_plan_t plan = MK_PLAN_INIT;
  const int64_t max_rows = ceil_div(call.m, view.nranks);
  const int64_t row_bytes = call.n * element_bytes(call.comm_dtype);
  const int max_chunks = std::min<int64_t>(
      {kMaxChunks, kFlagsPerBank / flags_per_chunk, (kSignalsPerBank - kEntrySignals) / signals_per_chunk});
  plan.tile_m = std::min(tuned(call.tuning.tile_m, TileGemm::kRows), TileGemm::kRows);
  plan.tile_n = std::min(tuned(call.tuning.tile_n, TileGemm::kColumns), TileGemm::kColumns);
  const Result<int32_t> chunk_rows = choose_chunk_rows(call, max_rows, row_bytes, plan.tile_m, max_chunks);
  if (!chunk_rows.ok()) return chunk_rows.status();
  plan.chunk_rows = chunk_rows.value();
  plan.num_chunks = std::max(1, num_chunks(max_rows, plan.chunk_rows));
  plan.chunk_bytes = plan.chunk_rows * row_bytes;
  plan.compute_ctas = tuned(call.tuning.compute_ctas, threads);
  plan.reduce_ctas = 1;
  return plan;
}

int flags_a_chunk(const TopologyView& view) {
  const int local = max_local_nranks(view);
  int most = 1;
  for (int node = 0; node < view.num_nodes; ++node) {
    const int owners = static_cast<int>(ceil_div(local, view.node_nranks(node)));
    most = std::max(most, view.num_nodes * owners * local);
  }
  return most;
}

Result<mk_plan_t> plan_host(const GemmCall& call, const TopologyView& view, int threads) {
  Result<mk_plan_t> chosen = plan_chunks(call, view, threads, flags_a_chunk(view), view.num_nodes);
  if (!chosen.ok()) return chosen;
  mk_plan_t& plan = chosen.value();
  const Schedule schedule = make_schedule(call, plan, view);
  plan.workspace_bytes = 2 * schedule.area_bytes();
  count_bytes(schedule, plan);
  return chosen;
}

}  // namespace mk::gemm_reduce_scatter
