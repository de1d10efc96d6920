// SPDX-License-Identifier: MIT
// How a GEMM operator runs on GPUs. Pure; what the ranks must agree on follows from globally
// equal fields alone.
#pragma once

#include "kernels/cuda/memory_rate.h"
#include "kernels/device/tile_scheduler.h"
#include "kernels/gemm/gemm_plan.h"
#include "kernels/operator_call.h"
#include "kernels/ops/gemm_reduce_scatter/merged_rows.h"
#include "kernels/ops/gemm_reduce_scatter/network_schedule.h"
#include "kernels/ops/gemm_reduce_scatter/owner_tiles.h"
#include "kernels/ops/gemm_reduce_scatter/reduction.h"
#include "kernels/ops/gemm_reduce_scatter/swapped_tiles.h"
#include "kernels/protocol.h"
#include "lib/status.h"

namespace mk {

struct RankGemmPlan {
  mk_plan_t plan;
  GemmPlan gemm;        // tile, raster
  int tile_rows = 0;    // rows of tiles of a rank, at most
  int num_owners = 1;   // ranks that rows of tiles are counted for
  bool merged = false;  // a tile has rows of several ranks
  // Of a CTA, from which on CTAs keep in step.
  int64_t out_of_step_k_steps = OUT_OF_STEP_K_STEPS;
  // All-gather.
  int num_panels = 1;
  int panel_steps = 1;
  int num_push_warps = 1;       // of a CTA that computes
  int num_late = 0;             // CTAs that first push and then compute
  int late_tile = 0;            // whole tiles that are dealt out among the others before
  bool shares_tiles = false;    // see LateTileSchedule
  bool spreads_tiles = false;   // likewise
  bool sweeps_columns = false;  // tiles of the same columns are computed at the same time, though not merged
  // Reductions.
  bool is_between_nodes = false;
  bool is_paced = false;     // pushes leave the links free most of the time
  bool sums_beside = false;  // see gemm_reduce_scatter::CudaParams
  gemm_reduce_scatter::Reduction reduction = gemm_reduce_scatter::Reduction::scatter;
  bool splits_rows = true;  // each owner has rows of its own, or columns; one-shot: neither
  bool splits_columns = false;
  bool is_direct = false;  // what is exchanged goes straight from registers,
  bool is_tagged = false;  // and in tagged packets,
  size_t packets = 0;      // whose memory begins there in every rank's: filled in by the executor
  int64_t packet_slot_bytes = 0;
  gemm_reduce_scatter::MergedRows merged_rows{};
  gemm_reduce_scatter::SwappedTiles swapped_tiles{};
  int64_t num_partial_flags = 0;
  gemm_reduce_scatter::OwnerTiles owner_tiles{};
  int64_t tiles_per_owner = 0;
  int64_t slot_bytes = 0;
  int64_t gather_begin = 0;
  int64_t gather_pitch = 0;
  int64_t area_bytes = 0;  // of a bank
  // Reductions between nodes.
  gemm_reduce_scatter::NetworkSchedule network{};
  gemm_reduce_scatter::NetworkTiles network_tiles{};
  gemm_reduce_scatter::Reducers reducers{};
};

// `nodes`: who is where, when the ranks are on several nodes; null: they are on one. `limits`: the clusters
// that every rank's device runs at a time; by default none. MK_ERROR_UNSUPPORTED: more flags or signals than a
// bank has, or what is not built between nodes.
Result<RankGemmPlan> rank_gemm_plan(const GemmCall& call, int rank, int nranks, int num_sms,
                                    const TopologyView* nodes = nullptr, const GemmClusterLimits& limits = {},
                                    double memory_bytes_per_us = H100_MEMORY_BYTES_PER_US);

}  // namespace mk
