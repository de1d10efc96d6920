// SPDX-License-Identifier: MIT
// What rank_gemm_plan() is made of: the plan of each kind of operator, and what these share. For
// rank_gemm_plan.cc, allgather_gemm_plan.cc and gemm_reduction_plan.cc alone.
#pragma once

#include <cstdint>
#include <span>

#include "kernels/cuda/link_rates.h"
#include "kernels/cuda/rank_gemm_plan.h"

namespace mk {

// Chunks of gathered rows are as high as the highest tile, so that they do not depend on a rank's own choice.
constexpr int CHUNK_ROWS = 128;
// What tiles cut along k take of the predicted time where warpgroups take turns.
constexpr double PING_PONG_CUT_FACTOR = 1.15;

bool may_take(const GemmCall& call, const GemmTile& tile);

// The tile, one of `tiles`, for `num_owners` owners' rows, or, `by_columns`, so many owners' columns of the
// same rows, by the model of the plain product; with `cuts`, tiles of the last wave may be cut along k.
GemmPlan choose_tile(const GemmCall& call, std::span<const GemmTile> tiles, int64_t rows, int num_owners,
                     int64_t k, int num_sms, bool cuts, bool by_columns = false);

// Rows of tiles are walked in groups; a group that divides a rank's rows does not reach into the next rank's.
int group_rows(int wanted, int tile_rows);

Status too_many_flags(const GemmCall& call, int64_t flags);
Status check_signals(const GemmCall& call, int64_t signals);

void fill_public_plan(const GemmCall& call, int nranks, int num_sms, RankGemmPlan& to);

// CTAs that compute, of `num_ctas`.
int compute_ctas(const GemmCall& call, int num_ctas);

// Of all-gathers. Where there is no tile as `call.tuning` wants it, to.gemm.block_m is left 0, here and in
// plan_reduction().
Status plan_gather(const GemmCall& call, int rank, int nranks, int num_sms, const GemmClusterLimits& limits,
                   RankGemmPlan& to);
// Mode WGRAD: a tile of C wants all rows, but only of its columns, which travel in panels.
Status plan_wgrad(const GemmCall& call, int rank, int nranks, int num_sms, RankGemmPlan& to);
// Chunks travel between nodes whole, each with a signal of its own.
Status plan_network_gather(const GemmCall& call, const TopologyView& nodes, RankGemmPlan& to);

// Of reductions.
Status plan_reduction(const GemmCall& call, int rank, int nranks, int num_sms, const GemmClusterLimits& limits,
                      RankGemmPlan& to);
// Sums and finished tiles travel in chunks of tiles.
Status plan_network_reduction(const GemmCall& call, const TopologyView& nodes, int num_sms, RankGemmPlan& to);

}  // namespace mk
