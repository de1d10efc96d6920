// SPDX-License-Identifier: MIT
#include "plan.h"

#include "../gemm_reduce_scatter/plan.h"

namespace mk::ring_attention_backward {
namespace {

int max_local_nranks(const TopologyView& view) {
  int largest = 0;
  for (int node = 0; node < view.num_nodes; ++node) largest = std::max(largest, view.node_nranks(node));
  return largest;
}

// Parts of dK and dV that go to a reducer of this node, and node sums that this rank puts to their owners.
void count_gradient_bytes(const Schedule& schedule, mk_plan_t& plan) {
  const TopologyView& view = schedule.gather.topology;
  for (int owner = 0; owner < view.nranks; ++owner) {
    const int reducer = schedule.reduce.reducer(owner, view.node());
    for (int chunk = 0; chunk < schedule.gather.chunks(owner); ++chunk) {
      const auto bytes = static_cast<int64_t>(schedule.chunk_bytes(owner, chunk));
      if (reducer != view.rank && schedule.gather.needs(view.rank, owner, chunk)) plan.link_bytes += bytes;
      if (reducer == view.rank && !view.is_local(owner) &&
          schedule.gather.node_needs(view.node(), owner, chunk)) {
        plan.network_bytes += bytes;
      }
    }
  }
}

}  // namespace

Schedule make_schedule(const RingAttentionCall& call, const mk_plan_t& plan,
                       const ring_attention::Schedule& gather) {
  const TopologyView& view = gather.topology;
  const int64_t columns = call.batch * call.kv_heads * call.dim * 2;
  return {gather,
          {view, gather.slot_rows * view.nranks, columns, gather.chunk_rows, plan.tile_m, plan.num_chunks,
           max_local_nranks(view), static_cast<int>(sizeof(float))}};
}

Result<mk_plan_t> plan_host(const RingAttentionCall& call, const TopologyView& view, int threads) {
  Result<mk_plan_t> chosen = ring_attention::plan_chunks(
      call, view, threads, view.nranks + gemm_reduce_scatter::flags_a_chunk(view), view.nranks + view.num_nodes,
      call.batch * call.kv_heads * call.dim * int64_t{8});
  if (!chosen.ok()) return chosen;
  const ring_attention::Slices slices = ring_attention::make_slices(call, view, false);
  const std::vector<int64_t> rows = ring_attention::count_rows(slices);
  const ring_attention::Schedule gather =
      ring_attention::make_schedule(call, chosen.value(), view, slices, rows);
  const Schedule schedule = make_schedule(call, chosen.value(), gather);
  chosen->reduce_ctas = 1;
  chosen->workspace_bytes = 2 * schedule.area_bytes();
  ring_attention::count_bytes(gather, chosen.value());
  count_gradient_bytes(schedule, chosen.value());
  return chosen;
}

}  // namespace mk::ring_attention_backward
