// SPDX-License-Identifier: MIT
// Gradients of ring attention over packed sequences between nodes: what the roles of cuda_network.cuh need to
// know and find out of cu_seqlens.
#pragma once

#include "kernels/ops/ring_attention/cuda_packed_network.cuh"
#include "kernels/ops/ring_attention_backward/cuda_network.cuh"
#include "kernels/ops/ring_attention_backward/cuda_packed_parts.cuh"

namespace mk::ring_attention_backward {

__device__ __forceinline__ PackedKeyTilesOf<FarRanksFirst> key_tiles_of(const PackedNetworkParams& params) {
  return {params.tiles.slices, {{params.comm.order.rank_at}}, params.panels.num_heads, params.heads_at_once};
}

// By one thread, from begin_packed().
__device__ __forceinline__ void settle_network(PackedNetworkParams& params,
                                               const ring_attention::PanelNeeds& needs) {
  ring_attention::settle_network(params, needs);
  params.num_key_tiles = key_tiles_of(params).size();
}

}  // namespace mk::ring_attention_backward
