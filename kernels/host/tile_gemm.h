// SPDX-License-Identifier: MIT
#pragma once

#include <cstdint>

#include "mkernel.h"

namespace mk {

// One tile of a product on the host: out[i][j] = sum over kk of A[i, kk] * B[kk, column + j], fp32. Each
// element is summed in the order of kk, whatever the tile, so that its bits depend on nothing else.
struct TileGemm {
  static constexpr int kRows = 64;
  static constexpr int kColumns = 64;

  const void* a;  // first row of the tile
  int64_t lda;
  const void* b;  // whole B
  int64_t ldb;
  mk_layout_t b_layout;
  mk_dtype_t dtype;
  int64_t k;
  int64_t column;
  int rows;     // 1 .. kRows
  int columns;  // 1 .. kColumns
  // Where the rows of the tile are, [rows], when they do not follow each other; `a` is not looked at then.
  const void* const* a_rows = nullptr;

  // out: [kRows][kColumns]; what is beyond rows and columns is undefined.
  void compute(float* out) const;
};

}  // namespace mk
