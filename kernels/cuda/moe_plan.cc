// SPDX-License-Identifier: MIT
#include "kernels/cuda/moe_plan.h"

#include <algorithm>
#include <cmath>

#include "kernels/gemm/gemm_plan.h"
#include "kernels/ops/moe_routing/row_segments.h"
#include "kernels/protocol.h"

namespace mk {
namespace {

// Tiles of a group are counted with 32 bits.
constexpr int64_t MAX_WIDTH = 1 << 18;
constexpr int64_t MAX_AREA_BYTES = int64_t{1} << 46;
// Rows of an expert up to which the low tile is the better one: it is bound by the weights either way.
constexpr int64_t FEW_ROWS = 64;
constexpr double FLOPS_PER_US = 660e6;
constexpr double BYTES_PER_US_OF_CTA = 38e3;

moe::Routing routing_of(const MoeCall& call, int nranks) {
  moe::Routing routing{};
  routing.topology.nranks = nranks;
  routing.topology.num_nodes = 1;
  routing.experts = call.experts;
  routing.topk = call.topk;
  return routing;
}

// The most rows that one rank can receive, and that one rank's tokens can become.
struct RowBounds {
  int64_t received;
  int64_t sent;
};

RowBounds bounds_of(const MoeCall& call, int nranks) {
  const int64_t routed = call.max_tokens * call.topk;
  const bool is_counted = call.is_maxima && call.max_tokens > 0;
  const int64_t capacity = is_counted && call.capacity_rows == 0 ? nranks * routed : call.capacity_rows;
  return {capacity, is_counted ? std::min(nranks * capacity, routed) : nranks * capacity};
}

// Bytes as doubles are as good as exact here, and do not overflow.
Status check_area(const MoeCall& call, double bytes) {
  if (bytes <= static_cast<double>(MAX_AREA_BYTES)) return {};
  return Status(MK_ERROR_UNSUPPORTED,
                format("mk_%s: %.3g bytes on one rank are more than a launch can move; lower capacity_rows or "
                       "tokens",
                       operator_name(call.op), bytes));
}

moe_dispatch_gemm::CudaLayout layout_of(const MoeCall& call, int nranks, int64_t capacity) {
  return {static_cast<int64_t>(routing_of(call, nranks).counts_bytes()), capacity, call.hidden * 2,
          nranks * capacity};
}

Status plan_areas(const MoeCall& call, int nranks, MoePlan& to) {
  const RowBounds rows = bounds_of(call, nranks);
  const int experts_per_rank = routing_of(call, nranks).experts_per_rank();
  const double home_bytes = static_cast<double>(rows.received + rows.sent) * static_cast<double>(call.hidden) *
                            element_bytes(call.out_dtype);
  const double dispatch_bytes =
      static_cast<double>(rows.received) * (static_cast<double>(call.hidden) * 2 + 16 + 4.0 * nranks);
  MK_RETURN_IF_ERROR(check_area(call, std::max(home_bytes, dispatch_bytes)));
  const int64_t blocks = ceil_div(rows.received, moe::BLOCK_ROWS) + experts_per_rank;
  if (nranks + nranks * blocks > kFlagsPerBank) {
    return Status(MK_ERROR_UNSUPPORTED,
                  format("mk_%s: %lld rows on one rank need %lld flags of transfer; a launch has %d: lower "
                         "capacity_rows or tokens",
                         operator_name(call.op), static_cast<long long>(rows.received),
                         static_cast<long long>(nranks + nranks * blocks), kFlagsPerBank));
  }
  to.blocks_per_source = static_cast<int>(blocks);
  to.layout = layout_of(call, nranks, rows.received);
  to.area_bytes = to.layout.counts_bytes;
  if (call.is_maxima || call.op == MK_OPERATOR_MOE_DISPATCH_GEMM) to.area_bytes = to.layout.bytes();
  if (call.is_maxima) {
    const int64_t home =
        to.layout.counts_bytes + (rows.received + rows.sent) * call.hidden * element_bytes(call.out_dtype);
    to.area_bytes = std::max(to.area_bytes, home);
  }
  return {};
}

// This rank's guess of the rows of an expert: its own tokens are as many as the others'.
int64_t guessed_rows(const MoeCall& call, int nranks) {
  if (call.tokens == 0) return ceil_div(call.capacity_rows * nranks, call.experts);
  return ceil_div(call.tokens * call.topk * nranks, call.experts);
}

Status choose_tile(const MoeCall& call, int nranks, MoePlan& to) {
  const bool is_low = guessed_rows(call, nranks) <= FEW_ROWS;
  bool is_found = false;
  for (int i = 0; i < moe::NUM_CUDA_TILES; ++i) {
    const GemmTile& tile = moe::CUDA_TILES[i];
    if (call.tuning.tile_m > 0 && call.tuning.tile_m != tile.block_m) continue;
    if (call.tuning.tile_n > 0 && call.tuning.tile_n != tile.block_n) continue;
    if (is_found && !is_low) continue;
    is_found = true;
    to.tile = i;
  }
  if (is_found) return {};
  return Status(MK_ERROR_UNSUPPORTED, format("mk_%s: tuning: there is no tile of tile_m=%d, tile_n=%d",
                                             operator_name(call.op), call.tuning.tile_m, call.tuning.tile_n));
}

// CTAs that do nothing but push: as many as bring rows as fast as the others compute them, and no more than
// fill the links and the share of rows that stay at home.
int choose_push_ctas(const MoeCall& call, int num_sms) {
  constexpr double MIN_PUSH_CTAS = 4;
  constexpr double MAX_PUSH_CTAS = 14;
  constexpr double SPARE = 1.15;
  if (call.tuning.copy_ctas > 0) return std::clamp(call.tuning.copy_ctas, 1, num_sms - 1);
  // A row of `hidden` elements takes 2 * hidden * inter operations.
  const double element = call.op == MK_OPERATOR_MOE_DISPATCH_GEMM ? 2 : element_bytes(call.out_dtype);
  const double bytes_per_us = FLOPS_PER_US * element / (2 * static_cast<double>(call.inter));
  const double wanted = std::ceil(SPARE * bytes_per_us / BYTES_PER_US_OF_CTA);
  return std::clamp(static_cast<int>(std::clamp(wanted, MIN_PUSH_CTAS, MAX_PUSH_CTAS)), 1,
                    std::max(1, num_sms / 4));
}

}  // namespace

Result<MoePlan> moe_plan(const MoeCall& call, int nranks, int num_sms) {
  if (call.experts > moe::CUDA_MAX_EXPERTS) {
    return Status(MK_ERROR_UNSUPPORTED, format("mk_%s: experts=%d: on GPUs at most %d over all ranks",
                                               operator_name(call.op), call.experts, moe::CUDA_MAX_EXPERTS));
  }
  if (std::max(call.hidden, call.inter) > MAX_WIDTH) {
    return Status(MK_ERROR_UNSUPPORTED,
                  format("mk_%s: hidden=%lld, inter=%lld: on GPUs each is at most %lld", operator_name(call.op),
                         static_cast<long long>(call.hidden), static_cast<long long>(call.inter),
                         static_cast<long long>(MAX_WIDTH)));
  }
  if (num_sms < 2) {
    return Status(MK_ERROR_UNSUPPORTED,
                  format("mk_%s: needs 2 SMs on every rank, one to move rows and one to compute, saw %d; raise "
                         "max_ctas or lower reserved_sms",
                         operator_name(call.op), num_sms));
  }
  MoePlan to;
  to.plan = MK_PLAN_INIT;
  MK_RETURN_IF_ERROR(plan_areas(call, nranks, to));
  MK_RETURN_IF_ERROR(choose_tile(call, nranks, to));
  mk_plan_t& plan = to.plan;
  const bool dispatches = call.op == MK_OPERATOR_MOE_DISPATCH_GEMM;
  const int64_t row_bytes = call.hidden * (dispatches ? 2 : element_bytes(call.out_dtype));
  plan.copy_ctas = choose_push_ctas(call, num_sms);
  plan.compute_ctas = num_sms - plan.copy_ctas;
  if (call.tuning.compute_ctas > 0) plan.compute_ctas = std::min(plan.compute_ctas, call.tuning.compute_ctas);
  plan.tile_m = moe::CUDA_TILES[to.tile].block_m;
  plan.tile_n = moe::CUDA_TILES[to.tile].block_n;
  plan.chunk_rows = moe::BLOCK_ROWS;
  plan.chunk_bytes = moe::BLOCK_ROWS * row_bytes;
  plan.num_chunks = to.blocks_per_source;
  if (nranks > 1) plan.link_bytes = call.tokens * call.topk * row_bytes;
  // Of a call which prepares itself.
  const MoeCall maxima = call.is_maxima ? call : maxima_of(call);
  MoePlan whole;
  MK_RETURN_IF_ERROR(plan_areas(maxima, nranks, whole));
  plan.workspace_bytes = 2 * static_cast<uint64_t>(whole.area_bytes);
  return to;
}

moe::CudaRouting cuda_routing(const MoeCall& call, int rank, int nranks) {
  const moe::Routing layout = routing_of(call, nranks);
  const bool combines = call.op == MK_OPERATOR_MOE_GEMM_COMBINE;
  moe::CudaRouting routing{};
  routing.rank = rank;
  routing.nranks = nranks;
  routing.experts = call.experts;
  routing.topk = call.topk;
  routing.experts_per_rank = layout.experts_per_rank();
  routing.block_bytes = static_cast<int>(layout.block_bytes());
  routing.rank_rows_at = static_cast<int>(layout.rank_rows_at(0));
  routing.received_at = static_cast<int>(layout.received_at(0));
  routing.tokens = call.tokens;
  routing.topk_idx = call.topk_idx;
  routing.has_wide_indices = call.index_type == MK_INDEX_INT64;
  routing.reads_record = combines || call.use_routing;
  routing.writes_record = !routing.reads_record;
  routing.has_rows = call.x != nullptr;
  routing.combines = combines;
  routing.record = call.routing;
  routing.record_bytes = call.routing_bytes;
  const moe::RecordLayout record = routing.record_layout();
  routing.items = moe::RecordView{call.routing}.at<moe::RecordItem>(record.items_offset());
  routing.row_capacity = combines ? INT64_MAX : call.capacity_rows;
  if (routing.writes_record) {  // the record takes no more rows than its memory
    const int64_t room = (static_cast<int64_t>(call.routing_bytes) - record.rows_offset()) /
                         static_cast<int64_t>(sizeof(mk_moe_row_t));
    routing.row_capacity = std::min(routing.row_capacity, room);
  }
  return routing;
}

}  // namespace mk
