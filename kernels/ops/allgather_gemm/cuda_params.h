// SPDX-License-Identifier: MIT
// AllGather+GEMM on GPUs: what its kernels are given.
#pragma once

#include <cuda.h>

#include <algorithm>

#include "kernels/device/gemm_epilogue_params.h"
#include "kernels/device/load_params.h"
#include "kernels/device/rank_comm.h"
#include "kernels/device/rank_tiles.h"
#include "kernels/gemm/gemm_plan.h"
#include "kernels/ops/allgather_gemm/panel_part.h"
#include "kernels/ops/allgather_gemm/push_units.h"
#include "kernels/ops/allgather_gemm/schedule.h"

namespace mk::allgather_gemm {

// Where the gathered rows are read when peers write straight to the gathered A.
constexpr int MAP_OF_OUTPUT = 2;

struct CudaParams {
  RankComm comm;
  LoadParams load;              // map_a: this rank's rows, where the caller has them
  CUtensorMap map_gathered[3];  // the receive areas of both banks, and the gathered A (MAP_OF_OUTPUT)
  TileSchedule tiles;
  LateTileSchedule late_tiles;  // the same, where CTAs compute that have pushed: inside a node
  RankTileOrder order;          // of the sources' rows of tiles: this rank's own, then the others' in turn
  EpilogueParams epilogue;      // C
  Schedule schedule;            // its topology's arrays are not for the device
  int m;                        // rows over all ranks
  int max_rows;                 // of a source: what all but the last ones have
  // Few rows: tiles run across the borders of sources, wait for all ranks' rows, panel by panel, and this
  // rank's own rows go through the receive area, too.
  bool merged;
  PushUnits push_units;
  // A chunk travels in panels of columns, each with a flag of its own, together with the others that are
  // computed at the same time: their tiles then compute along with the arrival, and not one after another.
  int num_panels;                         // up to MAX_PANELS
  int panel_steps;                        // k-steps a panel; mode WGRAD: times 64 columns of C
  int num_push_warps;                     // of a CTA that computes
  int piece_rows;                         // of a chunk, that a warp brings to the gathered A at a time
  int num_split_ctas;                     // of a cluster, which share a tile's inner dimension
  PanelPart panel_parts[MAX_SPLIT_CTAS];  // what each of them has of it
  const std::byte* a;
  int64_t a_pitch;        // bytes
  std::byte* a_gathered;  // or null
  int64_t a_gathered_pitch;
};

// How this rank's rows go to the others, through buffers of `buffer_bytes`. What a kernel is given need not be
// worked out before its first load.
inline PushUnits make_push_units(const CudaParams& params, const PushOrder& order, int buffer_bytes) {
  if (params.schedule.k == 0) return {};
  const int rows = std::max(0, std::min(params.max_rows, params.m - params.comm.rank * params.max_rows));
  return PushUnits(order, rows, static_cast<int>(params.schedule.chunk_rows),
                   static_cast<int>(params.schedule.k) * 2, params.panel_steps * 128, buffer_bytes);
}

// Between nodes.
struct NetworkParams : CudaParams {
  NearFarTileOrder far_order;  // instead of `order`
};

}  // namespace mk::allgather_gemm
