// SPDX-License-Identifier: MIT
#include "kernels/cuda/rank_gemm_plan.h"

#include <algorithm>

#include "kernels/cuda/gemm_type.h"
#include "kernels/cuda/rank_gemm_plan_parts.h"
#include "transport/command.h"

namespace mk {
namespace {

// Coordinates of TMA, and bytes of a row, are 32 bits.
constexpr int64_t kMaxSize = (INT32_MAX - 65536) / 2;
// What is left to the operator of `num_sms` CTAs, when one has the network.
constexpr int MIN_CTAS_BETWEEN_NODES = 3;

Status check_between_nodes(const GemmCall& call, int num_sms) {
  if (call.tuning.algorithm == MK_ALGORITHM_ONE_SHOT && call.op == MK_OPERATOR_GEMM_ALLREDUCE) {
    return Status(MK_ERROR_UNSUPPORTED,
                  format("mk_%s between nodes: MK_ALGORITHM_ONE_SHOT is not built; use MK_ALGORITHM_AUTO or "
                         "_TWO_SHOT",
                         operator_name(call.op)));
  }
  if (num_sms < MIN_CTAS_BETWEEN_NODES) {
    return Status(MK_ERROR_UNSUPPORTED,
                  format("mk_%s between nodes needs %d CTAs or more, the communicator may use %d (max_ctas, "
                         "reserved_sms)",
                         operator_name(call.op), MIN_CTAS_BETWEEN_NODES, num_sms));
  }
  return {};
}

// A reduction's CTAs wait for one another's partials, and fall out of step sooner, which an H100's memory does
// not forgive. What is read once because tiles of all rows go together must be kept together from the
// beginning.
int64_t out_of_step_k_steps(const RankGemmPlan& plan, bool reduces_in_node, double memory_bytes_per_us) {
  constexpr double FAST_MEMORY_BYTES_PER_US = 4e6;
  constexpr int64_t OF_REDUCTION = 3072;
  if (plan.sweeps_columns) return 0;
  return reduces_in_node && memory_bytes_per_us < FAST_MEMORY_BYTES_PER_US ? OF_REDUCTION : OUT_OF_STEP_K_STEPS;
}

}  // namespace

bool may_take(const GemmCall& call, const GemmTile& tile) {
  return (call.tuning.tile_m <= 0 || call.tuning.tile_m == tile.block_m) &&
         (call.tuning.tile_n <= 0 || call.tuning.tile_n == tile.block_n);
}

GemmPlan choose_tile(const GemmCall& call, std::span<const GemmTile> tiles, int64_t rows, int num_owners,
                     int64_t k, int num_sms, bool cuts, bool by_columns) {
  GemmPlan best;
  const bool is_wgrad = call.mode == MK_ALLGATHER_WGRAD;
  for (const GemmTile& tile : tiles) {
    if (!may_take(call, tile)) continue;
    // In more than one wave the highest takes longer than the model says: see choose_one_wave().
    if (tile.block_m > CHUNK_ROWS && call.tuning.tile_m == 0) continue;
    GemmShape shape;
    shape.m = (by_columns ? 1 : num_owners) * round_up(rows, tile.block_m);
    shape.n = by_columns ? num_owners * round_up(ceil_div(call.n, num_owners), tile.block_n) : call.n;
    shape.k = k;
    shape.in_type = gemm_type(call.dtype);
    shape.out_type = gemm_type(call.out_dtype);
    shape.accumulate = call.accumulate;
    // Ranks of a reduction choose alike, and b_layout is each rank's own.
    shape.b_transposed = call.op == MK_OPERATOR_ALLGATHER_GEMM && call.b_layout == MK_LAYOUT_NK && !is_wgrad;
    GemmPlan plan = gemm_plan_with(shape, num_sms, tile, -1);
    // Reductions do not store their tiles at once.
    if (call.op == MK_OPERATOR_ALLGATHER_GEMM) plan.predicted_us += gemm_plan_exposed_us(shape, plan);
    if (best.block_m == 0 || plan.predicted_us < best.predicted_us) best = plan;
    const int64_t rest = gemm_plan_num_tiles(shape, plan) % num_sms;
    if (!cuts || rest == 0) continue;
    GemmPlan cut = gemm_plan_with(shape, num_sms, tile, static_cast<int>(rest));
    if (tile.ping_pong) cut.predicted_us *= PING_PONG_CUT_FACTOR;
    if (call.op == MK_OPERATOR_ALLGATHER_GEMM) cut.predicted_us += gemm_plan_exposed_us(shape, cut);
    if (cut.num_workers == num_sms && cut.predicted_us < best.predicted_us) best = cut;
  }
  return best;
}

int group_rows(int wanted, int tile_rows) {
  for (int group = std::min(wanted, tile_rows); 2 * group > wanted && group > 1; --group) {
    if (tile_rows % group == 0) return group;
  }
  return std::max(1, std::min(wanted, tile_rows));
}

Status too_many_flags(const GemmCall& call, int64_t flags) {
  return Status(MK_ERROR_UNSUPPORTED,
                format("mk_%s: m=%lld, n=%lld needs %lld flags of transfer; a launch has %d: use several calls",
                       operator_name(call.op), static_cast<long long>(call.m), static_cast<long long>(call.n),
                       static_cast<long long>(flags), kFlagsPerBank));
}

Status check_signals(const GemmCall& call, int64_t signals) {
  if (signals <= kSignalsPerBank - kEntrySignals) return {};
  return Status(
      MK_ERROR_UNSUPPORTED,
      format("mk_%s: m=%lld, n=%lld needs %lld signals between nodes; a launch has %d: use several calls",
             operator_name(call.op), static_cast<long long>(call.m), static_cast<long long>(call.n),
             static_cast<long long>(signals), static_cast<int>(kSignalsPerBank) - kEntrySignals));
}

void fill_public_plan(const GemmCall& call, int nranks, int num_sms, RankGemmPlan& to) {
  const int64_t max_rows = ceil_div(call.m, nranks);
  mk_plan_t& plan = to.plan;
  plan.compute_ctas = num_sms;
  plan.tile_m = to.gemm.is_swapped ? to.gemm.block_n : to.gemm.block_m;
  plan.tile_n = to.gemm.is_swapped ? to.gemm.block_m : to.gemm.block_n;
  plan.chunk_rows = CHUNK_ROWS;
  plan.num_chunks = std::max(1, num_chunks(max_rows, CHUNK_ROWS));
  plan.workspace_bytes = 2 * static_cast<uint64_t>(to.area_bytes);
}

int compute_ctas(const GemmCall& call, int num_ctas) {
  return call.tuning.compute_ctas > 0 ? std::min(call.tuning.compute_ctas, num_ctas) : num_ctas;
}

Result<RankGemmPlan> rank_gemm_plan(const GemmCall& call, int rank, int nranks, int num_sms,
                                    const TopologyView* nodes, const GemmClusterLimits& limits,
                                    double memory_bytes_per_us) {
  if (std::max({call.m, call.n, call.k}) > kMaxSize) {
    return Status(MK_ERROR_UNSUPPORTED,
                  format("mk_%s: m=%lld, n=%lld, k=%lld: on GPUs each is at most %lld", operator_name(call.op),
                         static_cast<long long>(call.m), static_cast<long long>(call.n),
                         static_cast<long long>(call.k), static_cast<long long>(kMaxSize)));
  }
  RankGemmPlan plan;
  plan.plan = MK_PLAN_INIT;
  if (nodes != nullptr) {
    MK_RETURN_IF_ERROR(check_between_nodes(call, num_sms));
    num_sms -= 1;
  }
  plan.is_between_nodes = nodes != nullptr;
  GemmCall planned = call;
  if (nodes != nullptr && call.op == MK_OPERATOR_GEMM_ALLREDUCE)
    planned.tuning.algorithm = MK_ALGORITHM_TWO_SHOT;
  const bool gathers = call.op == MK_OPERATOR_ALLGATHER_GEMM;
  if (gathers && call.mode == MK_ALLGATHER_WGRAD) {
    MK_RETURN_IF_ERROR(plan_wgrad(planned, rank, nranks, num_sms, plan));
  } else {
    const auto plan_operator = gathers ? plan_gather : plan_reduction;
    MK_RETURN_IF_ERROR(plan_operator(planned, rank, nranks, num_sms, limits, plan));
  }
  if (plan.gemm.block_m == 0) {
    return Status(MK_ERROR_UNSUPPORTED, format("mk_%s: tuning: there is no tile of tile_m=%d, tile_n=%d",
                                               operator_name(call.op), call.tuning.tile_m, call.tuning.tile_n));
  }
  plan.gemm.group_m = plan.sweeps_columns ? plan.num_owners * plan.tile_rows
                                          : group_rows(plan.gemm.group_m, std::max(1, plan.tile_rows));
  plan.out_of_step_k_steps = out_of_step_k_steps(plan, !gathers && nodes == nullptr, memory_bytes_per_us);
  if (nodes != nullptr) {
    MK_RETURN_IF_ERROR(gathers ? plan_network_gather(call, *nodes, plan)
                               : plan_network_reduction(call, *nodes, num_sms, plan));
  }
  return plan;
}

}  // namespace mk
