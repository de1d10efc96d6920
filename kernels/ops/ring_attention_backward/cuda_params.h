// SPDX-License-Identifier: MIT
// Gradients of ring attention on GPUs: what the two kernels of a call are given.
#pragma once

#include <cuda.h>

#include "kernels/device/rank_comm.h"
#include "kernels/ops/ring_attention/cuda_params.h"
#include "kernels/ops/ring_attention_backward/circular_blocks.h"
#include "kernels/ops/ring_attention_backward/cuda_blocks.h"
#include "kernels/ops/ring_attention_backward/network_parts.h"

namespace mk::ring_attention_backward {

// A caller's tensor, [batch][head][row][dim] whatever the order in memory.
struct HeadRows {
  std::byte* data;
  int64_t row_bytes;
  int64_t head_bytes;
  int64_t batch_bytes;

  MK_HOST_DEVICE std::byte* at(int batch, int head, int64_t row) const {
    return data + batch * batch_bytes + head * head_bytes + row * row_bytes;
  }
};

struct RowSumParams {
  const LaunchState* state;
  std::byte* area;  // this rank's, of bank 0
  size_t bank_bytes;
  ring_attention::CudaSlices slices;
  QueryRowPlaces places;
  QuerySumPlaces query_sums;
  int rank;
  int heads;
  int dim;
  HeadRows o;
  HeadRows d_o;
  const float* lse;  // [batch][head][row]
};

template <class Panels>
struct CudaParamsOf {
  using Unit = ring_attention::PanelUnit;
  RankComm comm;
  CUtensorMap map_q;
  CUtensorMap map_d_o;
  CUtensorMap map_k;
  CUtensorMap map_v;
  ring_attention::QueryTiles tiles;
  Panels panels;
  int num_key_tiles;
  int num_push_ctas;  // the last ones that compute, until they have pushed everything
  int dim;
  float scale;
  HeadRows dq;
  HeadRows dk;
  HeadRows dv;
};

// Inside a node.
struct CudaParams : CudaParamsOf<GradientPanels> {
  KeyTiles key_tiles;
};

// Of one rank (see IsAlone), whose tiles may be in either order.
template <class Tiles>
struct AloneParamsOf : CudaParamsOf<GradientPanels> {
  static constexpr bool IS_ALONE = true;
  Tiles key_tiles;
};
using AloneParams = AloneParamsOf<KeyTiles>;
using CircularParams = AloneParamsOf<CircularKeyTiles>;
using ring_attention::IsAlone;

// Between nodes.
struct NetworkParams : CudaParamsOf<NetworkGradientPanels>, ring_attention::BetweenNodes {
  PartRoutes routes;
};
template <class Params>
concept HasRoutes = ring_attention::HasNodes<Params> && requires(const Params& params) {
  params.routes;
};

}  // namespace mk::ring_attention_backward
