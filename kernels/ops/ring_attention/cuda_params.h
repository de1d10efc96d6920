// SPDX-License-Identifier: MIT
// Ring attention on GPUs of one node: what its kernel is given.
#pragma once

#include <cuda.h>

#include "kernels/device/rank_comm.h"
#include "kernels/ops/ring_attention/cuda_blocks.h"

namespace mk::ring_attention {

struct CudaParams {
  RankComm comm;
  // This rank's rows, [batch][head][row][dim] whatever the order in memory.
  CUtensorMap map_q;
  CUtensorMap map_k;
  CUtensorMap map_v;
  QueryTiles tiles;
  KeyPanels panels;
  int num_push_ctas;  // the last ones of the grid, until they have pushed everything
  int dim;
  float scale_log2;  // |scale| log2(e)
  bool negate;       // scale < 0
  std::byte* o;
  int64_t o_row_bytes;
  int64_t o_head_bytes;
  int64_t o_batch_bytes;
  float* lse;        // or null
  int64_t lse_rows;  // of a head
};

}  // namespace mk::ring_attention
