// SPDX-License-Identifier: MIT
// Reductions of few 16-bit elements, which travel in tagged packets: what their kernels are given.
#pragma once

#include "kernels/device/rank_gemm_tiles.h"
#include "kernels/ops/gemm_reduce_scatter/cuda_params.h"
#include "kernels/ops/gemm_reduce_scatter/merged_rows.h"

namespace mk::gemm_reduce_scatter {

// The tiles that their kernels exist for, in the order of their tables.
constexpr GemmTile TAGGED_TILES[] = {{128, 128, true}, {64, 128, false}, {64, 64, false}};
constexpr int NUM_TAGGED_TILES = sizeof(TAGGED_TILES) / sizeof(TAGGED_TILES[0]);
constexpr int TAGGED_COLUMNS = 64;  // that a warp sums at a time

struct TaggedParams : CudaParams {
  size_t packets;               // their memory, in every rank's: bank 0 before bank 1
  int64_t packet_slot_bytes;    // a source's partial tiles, or an owner's finished ones
  int64_t packet_gather_begin;  // finished tiles, owner by owner
  MergedRows merged_rows;       // of a reduce-scatter
};

}  // namespace mk::gemm_reduce_scatter
