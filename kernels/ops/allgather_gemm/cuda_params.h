// SPDX-License-Identifier: MIT
// AllGather+GEMM on GPUs of one node: what its kernel is given.
#pragma once

#include <cuda.h>

#include "kernels/device/gemm_epilogue_params.h"
#include "kernels/device/load_params.h"
#include "kernels/device/rank_comm.h"
#include "kernels/device/tile_scheduler.h"
#include "kernels/ops/allgather_gemm/schedule.h"

namespace mk::allgather_gemm {

struct CudaParams {
  RankComm comm;
  LoadParams load;              // map_a: this rank's rows, where the caller has them
  CUtensorMap map_push;         // this rank's rows again, in a push warp's pieces
  CUtensorMap map_gathered[2];  // the receive areas of both banks
  TileSchedule tiles;           // rows of tiles: those of one source after another, tile_rows each
  EpilogueParams epilogue;      // C
  Schedule schedule;            // its topology's arrays are not for the device
  int tile_rows;                // of a source, at most
  int m;                        // rows over all ranks
  int max_rows;                 // of a source: what all but the last ones have
  // Few rows: tiles run across the borders of sources, and this rank's own rows go through the receive area,
  // too.
  bool merged;
  // A chunk travels in panels of columns, each with a flag of its own, when the tiles fit in a wave or two: all
  // of them then compute along with the arrival, and not one after another.
  int num_panels;
  int panel_steps;  // k-steps a panel
  int piece_rows;   // of a chunk, that a warp brings to the gathered A at a time
  const std::byte* a;
  int64_t a_pitch;        // bytes
  std::byte* a_gathered;  // or null
  int64_t a_gathered_pitch;
};

}  // namespace mk::allgather_gemm
