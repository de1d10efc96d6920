// SPDX-License-Identifier: MIT
// The kernels of a GEMM operator as the host launches them.
#pragma once

#include "kernels/device/rank_gemm_tiles.h"

namespace mk {

template <class Params>
struct RankGemmKernel {
  void (*kernel)(Params);
  int num_threads;
  int smem_bytes;
};
template <class Params, int NUM_TILES = NUM_RANK_GEMM_TILES>
struct RankGemmTable {
  // tile; B as [k, n] or as [n, k]
  RankGemmKernel<Params> entries[NUM_TILES][2];
};

}  // namespace mk
