// SPDX-License-Identifier: MIT
// Where 16-bit partial sums of swapped tiles, which hold rows of the product whoever owns them, lie on their
// way, and what says that they are there. Host and device.
#pragma once

#include <cstdint>

#include "kernels/device/host_device.h"

namespace mk::gemm_reduce_scatter {

constexpr int UNIT_COLUMNS = 64;  // that a warp sums at a time, of MergedRows::UNIT_ROWS rows

// A source's partial sums of an owner's rows, of 16 columns after another: a warp of a swapped tile has all
// rows of as many, and stores whole lines wherever an owner's rows begin.
struct PartialPanels {
  static constexpr int COLUMNS = 16;
  static constexpr int ROW_BYTES = COLUMNS * 2;
  int rows;  // of an owner, at most

  MK_HOST_DEVICE int64_t offset(int row, int column) const {
    return (int64_t{column / COLUMNS} * rows + row) * ROW_BYTES + column % COLUMNS * 2;
  }
  MK_HOST_DEVICE int64_t bytes(int num_column_units) const {
    return int64_t{num_column_units} * UNIT_COLUMNS * rows * 2;
  }
};

// A source's tiles, for each of which its CTA raises a flag at the owners of the rows that it has multiplied.
struct SwappedTiles {
  int num_m_tiles;   // of the columns; of whole clusters
  int num_n_tiles;   // that share out the rows
  int tile_rows;     // from one to the next
  int tile_columns;  // of a tile

  MK_HOST_DEVICE int size() const { return num_m_tiles * num_n_tiles; }
  MK_HOST_DEVICE int number(int m_tile, int n_tile) const { return m_tile * num_n_tiles + n_tile; }
  // Those that some rows of the product need, of columns from `column` on, follow one another.
  MK_HOST_DEVICE int first(int row, int column) const { return number(column / tile_columns, row / tile_rows); }
  MK_HOST_DEVICE int count(int row, int num_rows) const {
    return (row + num_rows - 1) / tile_rows - row / tile_rows + 1;
  }
};

}  // namespace mk::gemm_reduce_scatter
