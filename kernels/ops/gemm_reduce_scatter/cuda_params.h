// SPDX-License-Identifier: MIT
// GEMM+ReduceScatter and GEMM+AllReduce on GPUs: what their kernels are given.
#pragma once

#include "kernels/device/gemm_epilogue_params.h"
#include "kernels/device/load_params.h"
#include "kernels/device/rank_comm.h"
#include "kernels/device/rank_tiles.h"
#include "kernels/ops/gemm_reduce_scatter/network_schedule.h"
#include "kernels/ops/gemm_reduce_scatter/owner_tiles.h"
#include "kernels/ops/gemm_reduce_scatter/reduction.h"

namespace mk::gemm_reduce_scatter {

// The most ranks whose partials of a few columns a push warp has room for in shared memory.
constexpr int MOST_SOURCES_BESIDE = 4;

struct CudaParams {
  RankComm comm;
  LoadParams load;
  TileSchedule tiles;      // rows of tiles: those of one owner after another, as many for each
  OwnerTiles owner_tiles;  // their order
  EpilogueParams output;   // C, bias
  GemmType comm_type;
  Reduction reduction;
  RankTileOrder order;    // of an owner's rows of tiles, at most: all of one owner's after the other's
  int m;                  // rows over all ranks
  int max_rows;           // of an owner: what all but the last ones have
  bool splits_rows;       // each owner has rows of its own
  bool splits_columns;    // or columns of its own; one-shot: neither
  bool is_direct;         // what is exchanged goes straight from registers
  bool sums_beside;       // push warps sum own tiles while the next are computed
  int tiles_per_owner;    // rows of tiles times tiles across
  int64_t slot_bytes;     // a source's partial tiles
  int first_flag;         // of partials: [source][tile], direct: [source][tile][16 rows]
  int first_gather_flag;  // of finished tiles: [owner][tile], direct: [owner][tile][unit]
  int64_t gather_begin;   // finished rows in the receive area
  int64_t gather_pitch;
  bool is_paced;  // pushes leave the links free most of the time
};

// Between nodes.
struct NetworkParams : CudaParams {
  NetworkSchedule network;
  NetworkTiles network_tiles;  // instead of owner_tiles
  Reducers reducers;
};

}  // namespace mk::gemm_reduce_scatter
