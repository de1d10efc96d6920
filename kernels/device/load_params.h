// SPDX-License-Identifier: MIT
#pragma once

#include <cuda.h>

#include <cstdint>

#include "kernels/device/divisor.h"
#include "kernels/device/gemm_cluster.h"
#include "kernels/device/host_device.h"

namespace mk {

// How many rows of an operand a box has. How many boxes some rows take, the thread that loads asks for each
// tile, and a launch's first loads wait for the answer.
class BoxRows {
 public:
  BoxRows() = default;
  explicit BoxRows(int num) : num_(num), divisor_(num) {}
  MK_HOST_DEVICE int num() const { return num_; }
  MK_HOST_DEVICE int boxes_of(int rows) const { return (rows + num_ - 1) / divisor_; }

 private:
  int num_ = 0;
  Divisor divisor_;
};

// Of a stage, only boxes with something of the matrix in them are loaded: TMA takes about 6 cycles for each row
// of zeros outside, 2 for one inside. What is left unwritten only reaches accumulators that are not stored.
struct LoadParams {
  CUtensorMap map_a;
  CUtensorMap map_b;
  BoxRows a_box;  // where A is [M, K]; else boxes have 64 of its M columns
  BoxRows b_box;  // where B is [N, K]; else boxes have 64 of its N columns
  int n;          // columns of B
};

// Boxes of TMA that a stage's part of an operand takes, and how many of its rows (of M or N) each has.
struct StageBoxes {
  int num;
  int rows;
  MK_HOST_DEVICE uint32_t bytes() const { return num * rows * 128; }
};

// Of a tile of which `rows_left` rows are in the matrix.
MK_HOST_DEVICE int rows_of_block(int rows_left, int block_rows) {
  return rows_left < 0 ? 0 : rows_left < block_rows ? rows_left : block_rows;
}
MK_HOST_DEVICE StageBoxes stage_boxes(int rows_left, int block_rows, const BoxRows& box) {
  return {box.boxes_of(rows_of_block(rows_left, block_rows)), box.num()};
}
template <int BOX_ROWS>
MK_HOST_DEVICE StageBoxes stage_boxes(int rows_left, int block_rows) {
  return {(rows_of_block(rows_left, block_rows) + BOX_ROWS - 1) / BOX_ROWS, BOX_ROWS};
}

template <class Config>
MK_HOST_DEVICE StageBoxes a_stage_boxes(const LoadParams& params, int rows_left) {
  if constexpr (Config::CLUSTER.n > 1 && !Config::A_TRANSPOSED)
    return {Config::NUM_SHARING_CTAS, params.a_box.num()};  // all CTAs' parts, whatever is in them
  if constexpr (Config::A_TRANSPOSED) return stage_boxes<64>(rows_left, Config::BLOCK_M);
  return stage_boxes(rows_left, Config::BLOCK_M, params.a_box);
}

template <class Config>
MK_HOST_DEVICE StageBoxes b_stage_boxes(const LoadParams& params, int n, int tile_columns = Config::BLOCK_N) {
  if constexpr (!Config::B_TRANSPOSED) return stage_boxes<64>(params.n - n, Config::BLOCK_N);
  if constexpr (Config::CLUSTER.m > 1) return {Config::NUM_SHARING_CTAS, params.b_box.num()};
  return stage_boxes(params.n - n, tile_columns, params.b_box);
}

}  // namespace mk
