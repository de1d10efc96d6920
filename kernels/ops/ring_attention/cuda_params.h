// SPDX-License-Identifier: MIT
// Ring attention on GPUs: what its kernels are given.
#pragma once

#include <cuda.h>

#include "kernels/device/rank_comm.h"
#include "kernels/ops/ring_attention/cuda_blocks.h"
#include "kernels/ops/ring_attention/cuda_query_items.h"
#include "kernels/ops/ring_attention/network_panels.h"

namespace mk::ring_attention {

template <class Panels>
struct CudaParamsOf {
  using Unit = PanelUnit;
  RankComm comm;
  // This rank's rows, [batch][head][row][dim] whatever the order in memory.
  CUtensorMap map_q;
  CUtensorMap map_k;
  CUtensorMap map_v;
  QueryTiles tiles;
  QueryItems items;
  Panels panels;
  int num_push_ctas;  // the last ones that compute, until they have pushed everything
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

// Inside a node.
using CudaParams = CudaParamsOf<KeyPanels>;

// Of one rank, whose kernels have nothing of what there is between ranks: not because it would take long, but
// roles have no registers to spare.
struct AloneParams : CudaParams {
  static constexpr bool IS_ALONE = true;
};
template <class Params>
concept IsAlone = Params::IS_ALONE;

// Between nodes.
struct NetworkParams : CudaParamsOf<NetworkPanels>, BetweenNodes {};

}  // namespace mk::ring_attention
