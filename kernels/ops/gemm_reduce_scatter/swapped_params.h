// SPDX-License-Identifier: MIT
// Reductions of some hundred rows, whose tiles have the operands in each other's place and hold rows of the
// product whoever owns them: what their kernels are given.
#pragma once

#include "kernels/device/divisor.h"
#include "kernels/device/rank_gemm_tiles.h"
#include "kernels/ops/gemm_reduce_scatter/cuda_params.h"
#include "kernels/ops/gemm_reduce_scatter/merged_rows.h"
#include "kernels/ops/gemm_reduce_scatter/swapped_tiles.h"

namespace mk::gemm_reduce_scatter {

struct SwappedParams : CudaParams {
  MergedRows merged_rows;  // one-shot: as if one owner had all
  Divisor rows_of_owner;
  SwappedTiles swapped_tiles;
};

}  // namespace mk::gemm_reduce_scatter
