// SPDX-License-Identifier: MIT
#include "plan.h"

#include "../../../transport/command.h"
#include "../../plan.h"

namespace mk::ring_attention {

Slices make_slices(const RingAttentionCall& call, const TopologyView& view, bool packed) {
  return {call.seq,
          view.nranks,
          call.causal != MK_CAUSAL_NONE,
          call.causal == MK_CAUSAL_ZIGZAG,
          packed ? call.num_sequences : 0,
          packed ? call.cu_seqlens : nullptr};
}

std::vector<int64_t> count_rows(const Slices& slices) {
  std::vector<int64_t> rows;
  for (int rank = 0; rank < slices.nranks; ++rank) rows.push_back(slices.rows(rank));
  return rows;
}

Schedule make_schedule(const RingAttentionCall& call, const mk_plan_t& plan, const TopologyView& view,
                       const Slices& slices, const std::vector<int64_t>& rows_of_rank) {
  return {view,           slices,   rows_of_rank.data(), call.batch,
          call.kv_heads,  call.dim, plan.chunk_rows,     most_rows(call.seq, view.nranks, call.num_sequences),
          plan.num_chunks};
}

Result<mk_plan_t> plan_chunks(const RingAttentionCall& call, const TopologyView& view, int threads,
                              int flags_per_chunk, int signals_per_chunk, int64_t chunk_row_bytes) {
  mk_plan_t plan = MK_PLAN_INIT;
  const auto unsupported = [&](const std::string& sentence) {
    return Status(MK_ERROR_UNSUPPORTED, format("mk_%s: %s", operator_name(call.op), sentence.c_str()));
  };
  const int64_t max_rows = std::max<int64_t>(1, most_rows(call.seq, view.nranks, call.num_sequences));
  const int64_t most_chunks = std::min<int64_t>(
      {kMaxChunks, kFlagsPerBank / flags_per_chunk, (kSignalsPerBank - kEntrySignals) / signals_per_chunk});
  if (most_chunks < 1) return unsupported(format("%d ranks are more than its flags are for", view.nranks));
  const int64_t row_bytes = std::max<int64_t>(1, call.batch * call.kv_heads * call.dim * 4);
  const int64_t chunk_bytes = call.tuning.chunk_bytes > 0 ? call.tuning.chunk_bytes : kDefaultChunkBytes;
  const int64_t wanted = std::clamp<int64_t>(chunk_bytes / row_bytes, 1, max_rows);
  const int64_t rows = std::max(wanted, ceil_div(max_rows, most_chunks));
  if (rows > INT32_MAX || rows > kMaxChunkBytes / std::max<int64_t>(1, chunk_row_bytes)) {
    return unsupported(
        format("%lld rows a rank of %lld bytes (keys and values of all batches and heads, or their gradients) "
               "need %lld transfers of %lld rows; a transfer has at most %lld bytes: use more ranks or several "
               "calls",
               static_cast<long long>(max_rows), static_cast<long long>(chunk_row_bytes),
               static_cast<long long>(most_chunks), static_cast<long long>(rows),
               static_cast<long long>(kMaxChunkBytes)));
  }
  plan.chunk_rows = static_cast<int32_t>(rows);
  plan.num_chunks = num_chunks(max_rows, rows);
  plan.chunk_bytes = rows * row_bytes;
  plan.tile_m = std::min(tuned(call.tuning.tile_m, kMostTileRows), kMostTileRows);
  plan.tile_n = std::min(tuned(call.tuning.tile_n, kMostTileRows), kMostTileRows);
  plan.compute_ctas = tuned(call.tuning.compute_ctas, threads);
  plan.copy_ctas = 1;
  plan.send_ctas = view.num_nodes > 1 ? 1 : 0;
  plan.receive_ctas = view.num_nodes > 1 ? 1 : 0;
  return plan;
}

void count_bytes(const Schedule& schedule, mk_plan_t& plan) {
  const TopologyView& view = schedule.topology;
  for (int source = 0; source < view.nranks; ++source) {
    const bool own = source == view.rank;
    if (!own && !schedule.relays(source)) continue;
    for (int chunk = 0; chunk < schedule.chunks(source); ++chunk) {
      const int64_t bytes = schedule.chunk_count(source, chunk) * static_cast<int64_t>(schedule.row_bytes());
      for (int position = 1; position < view.local_nranks(); ++position) {
        if (schedule.needs(view.rotated(position), source, chunk)) plan.link_bytes += bytes;
      }
      for (int node = 0; own && node < view.num_nodes; ++node) {
        if (node != view.node() && schedule.node_needs(node, source, chunk)) plan.network_bytes += bytes;
      }
    }
  }
}

Result<mk_plan_t> plan_host(const RingAttentionCall& call, const TopologyView& view, int threads) {
  Result<mk_plan_t> chosen = plan_chunks(call, view, threads, view.nranks, view.nranks,
                                         call.batch * call.kv_heads * call.dim * int64_t{4});
  if (!chosen.ok()) return chosen;
  const Slices slices = make_slices(call, view, false);
  const std::vector<int64_t> rows = count_rows(slices);
  const Schedule schedule = make_schedule(call, chosen.value(), view, slices, rows);
  chosen->workspace_bytes = 2 * schedule.area_bytes();
  count_bytes(schedule, chosen.value());
  return chosen;
}

}  // namespace mk::ring_attention
