// SPDX-License-Identifier: MIT
#include "plan.h"

#include <limits>

#include "../../../transport/command.h"
#include "../../host/tile_gemm.h"
#include "../../plan.h"
#include "../moe_dispatch_gemm/schedule.h"
#include "../moe_gemm_combine/schedule.h"

namespace mk::moe {
namespace {

int max_local_nranks(const TopologyView& view) {
  int largest = 0;
  for (int node = 0; node < view.num_nodes; ++node) largest = std::max(largest, view.node_nranks(node));
  return largest;
}

// Byte offsets must fit the 48 bits of a command.
constexpr int64_t kMaxAreaBytes = int64_t{1} << 46;

struct Region {
  int64_t rows;
  int64_t row_bytes;
};

Result<int64_t> add_up(const MoeCall& maxima, int64_t bytes, std::initializer_list<Region> regions) {
  for (const Region& region : regions) {
    int64_t more = 0;
    if (__builtin_mul_overflow(region.rows, region.row_bytes, &more) || more > kMaxAreaBytes) {
      return Status(MK_ERROR_UNSUPPORTED,
                    format("mk_%s: %lld rows of %lld bytes on one rank are more than a launch can move; lower "
                           "capacity_rows or tokens",
                           operator_name(maxima.op), static_cast<long long>(region.rows),
                           static_cast<long long>(region.row_bytes)));
    }
    bytes += more;
  }
  return bytes;
}

}  // namespace

Routing make_routing(const MoeCall& call, const mk_plan_t& plan, const TopologyView& view) {
  return {view, call.experts, call.topk, plan.num_chunks, max_local_nranks(view), plan.chunk_rows, nullptr};
}

Result<mk_plan_t> plan_chunks(const MoeCall& call, const TopologyView& view, int threads, int64_t row_bytes,
                              int flags_per_chunk, int signals_per_chunk) {
  mk_plan_t plan = MK_PLAN_INIT;
  const int64_t chunk_bytes = call.tuning.chunk_bytes > 0 ? call.tuning.chunk_bytes : kDefaultChunkBytes;
  plan.chunk_rows = static_cast<int32_t>(std::max<int64_t>(1, chunk_bytes / row_bytes));
  plan.chunk_bytes = plan.chunk_rows * row_bytes;
  plan.num_chunks = static_cast<int32_t>(std::min<int64_t>(
      {kMaxChunks, (kFlagsPerBank - view.nranks) / flags_per_chunk,
       (static_cast<int>(kSignalsPerBank) - kEntrySignals - view.nranks) / signals_per_chunk}));
  if (plan.num_chunks < 1) {
    return Status(MK_ERROR_UNSUPPORTED,
                  format("mk_%s: %d ranks on %d nodes of up to %d are more than its flags can tell apart; use "
                         "smaller nodes (node_of_rank) or several communicators",
                         operator_name(call.op), view.nranks, view.num_nodes, max_local_nranks(view)));
  }
  plan.tile_m = std::min(tuned(call.tuning.tile_m, TileGemm::kRows), TileGemm::kRows);
  plan.tile_n = std::min(tuned(call.tuning.tile_n, TileGemm::kColumns), TileGemm::kColumns);
  plan.compute_ctas = tuned(call.tuning.compute_ctas, threads);
  plan.copy_ctas = 1;
  plan.receive_ctas = 1;
  plan.send_ctas = view.num_nodes > 1 ? 1 : 0;
  const Result<uint64_t> bytes = workspace_bytes(call, make_routing(call, plan, view));
  if (!bytes.ok()) return bytes.status();
  plan.workspace_bytes = bytes.value();
  const int64_t largest = bounds_of(call, view).tokens_per_node;
  if (ceil_div(largest, plan.num_chunks) > kMaxChunkBytes / row_bytes) {
    return Status(
        MK_ERROR_UNSUPPORTED,
        format("mk_%s: up to %lld tokens of %lld bytes from one rank to one node need transfers beyond "
               "%lld bytes; lower capacity_rows or tokens",
               operator_name(call.op), static_cast<long long>(largest), static_cast<long long>(row_bytes),
               static_cast<long long>(kMaxChunkBytes)));
  }
  return plan;
}

// Every token on its way becomes at least one row somewhere, so that rows bound tokens.
Bounds bounds_of(const MoeCall& maxima, const TopologyView& view) {
  constexpr int64_t kUnbounded = std::numeric_limits<int64_t>::max();
  const bool counted = maxima.max_tokens > 0;
  const int64_t tokens = counted ? maxima.max_tokens : kUnbounded;
  const int64_t worst = int64_t{view.nranks} * maxima.max_tokens * maxima.topk;
  const int64_t capacity = counted && maxima.capacity_rows > 0 ? std::min(maxima.capacity_rows, worst)
                           : counted                           ? worst
                                                               : maxima.capacity_rows;
  Bounds bounds;
  bounds.received_rows = capacity;
  for (int node = 0; node < view.num_nodes; ++node) {
    const int64_t node_rows = view.node_nranks(node) * capacity;
    int64_t relayed_ranks = 0;
    int64_t remote = 0;
    for (int other = 0; other < view.num_nodes; ++other) {
      if (other == node) continue;
      relayed_ranks += ceil_div(view.node_nranks(other), view.node_nranks(node));
      remote += std::min(tokens, view.node_nranks(other) * capacity);
    }
    const int64_t relayed = counted ? std::min(node_rows, relayed_ranks * tokens) : node_rows;
    const int64_t collected =
        counted ? std::min(node_rows, (relayed_ranks + 1) * tokens * maxima.topk) : node_rows;
    bounds.collected_rows = std::max(bounds.collected_rows, collected);
    bounds.relayed_tokens = std::max(bounds.relayed_tokens, view.num_nodes > 1 ? relayed : 0);
    bounds.remote_tokens = std::max(bounds.remote_tokens, remote);
    bounds.tokens_per_node = std::max(bounds.tokens_per_node, std::min(tokens, node_rows));
  }
  return bounds;
}

Result<uint64_t> workspace_bytes(const MoeCall& maxima, const Routing& routing) {
  const Bounds bounds = bounds_of(maxima, routing.topology);
  const moe_dispatch_gemm::Schedule dispatch{routing, maxima.hidden};
  const moe_gemm_combine::Schedule combine{routing, maxima.hidden, element_bytes(maxima.out_dtype)};
  const auto counts = static_cast<int64_t>(routing.counts_bytes());
  const auto packet = static_cast<int64_t>(dispatch.packet_bytes());
  const auto row = static_cast<int64_t>(combine.row_bytes());
  const auto route = static_cast<int64_t>(routing.route_bytes());
  const int64_t travelling = bounds.relayed_tokens + bounds.remote_tokens;
  const Result<int64_t> to_experts = add_up(maxima, counts, {{bounds.received_rows + travelling, packet}});
  if (!to_experts.ok()) return to_experts.status();
  const Result<int64_t> home =
      add_up(maxima, counts, {{bounds.collected_rows + travelling, row}, {travelling, route}});
  if (!home.ok()) return home.status();
  return static_cast<uint64_t>(2 * std::max(to_experts.value(), home.value()));
}

}  // namespace mk::moe
