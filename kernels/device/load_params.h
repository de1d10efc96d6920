// SPDX-License-Identifier: MIT
#pragma once

#include <cuda.h>

#include <cstdint>

#include "kernels/device/gemm_cluster.h"
#include "kernels/device/host_device.h"

namespace mk {

// Of a stage, only boxes with something of the matrix in them are loaded: TMA takes about 6 cycles for each row
// of zeros outside, 2 for one inside. What is left unwritten only reaches accumulators that are not stored.
struct LoadParams {
  CUtensorMap map_a;
  CUtensorMap map_b;
  int a_box_rows;  // where A is [M, K]; else boxes have 64 of its M columns
  int b_box_rows;  // where B is [N, K]; else boxes have 64 of its N columns
  int n;           // columns of B
};

// Boxes of TMA that a stage's part of an operand takes, and how many of its rows (of M or N) each has.
struct StageBoxes {
  int num;
  int rows;
  MK_HOST_DEVICE uint32_t bytes() const { return num * rows * 128; }
};

// Of a tile of which `rows_left` rows are in the matrix.
MK_HOST_DEVICE StageBoxes stage_boxes(int rows_left, int block_rows, int box_rows) {
  const int rows = rows_left < 0 ? 0 : rows_left < block_rows ? rows_left : block_rows;
  return {(rows + box_rows - 1) / box_rows, box_rows};
}

template <class Config>
MK_HOST_DEVICE StageBoxes a_stage_boxes(const LoadParams& params, int rows_left) {
  if constexpr (Config::CLUSTER.n > 1 && !Config::A_TRANSPOSED)
    return {Config::NUM_SHARING_CTAS, params.a_box_rows};  // all CTAs' parts, whatever is in them
  return stage_boxes(rows_left, Config::BLOCK_M, Config::A_TRANSPOSED ? 64 : params.a_box_rows);
}

template <class Config>
MK_HOST_DEVICE StageBoxes b_stage_boxes(const LoadParams& params, int n, int tile_columns = Config::BLOCK_N) {
  if constexpr (!Config::B_TRANSPOSED) return stage_boxes(params.n - n, Config::BLOCK_N, 64);
  if constexpr (Config::CLUSTER.m > 1) return {Config::NUM_SHARING_CTAS, params.b_box_rows};
  return stage_boxes(params.n - n, tile_columns, params.b_box_rows);
}

}  // namespace mk
