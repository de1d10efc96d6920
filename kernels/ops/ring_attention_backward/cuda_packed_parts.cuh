// SPDX-License-Identifier: MIT
// Gradients of ring attention over packed sequences: what cuda_parts.cuh says of one sequence.
#pragma once

#include "kernels/ops/ring_attention_backward/cuda_packed_params.h"
#include "kernels/ops/ring_attention_backward/cuda_parts.cuh"

namespace mk::ring_attention_backward {

using ring_attention::IsPacked;

__device__ __forceinline__ RingOrder key_order(const PackedParams& params) { return {params.comm.rank}; }
__device__ __forceinline__ PackedKeyTiles key_tiles_of(const PackedParams& params) {
  return {params.tiles.slices, {{params.comm.rank}}, params.panels.num_heads};
}

// Does rank `other` have a part of a tile of this rank's keys?
template <IsPacked Params>
__device__ __forceinline__ bool has_part(const Params& params, int other, const KeyTile& tile) {
  return sees_some(params.tiles.slices, other, params.comm.rank, PackedKeyTiles::rows_of(tile));
}

template <IsPacked Params>
__device__ __forceinline__ int parts_of_panel(const Params& params, const KeyTile& tile, int panel) {
  const int panel_tiles = params.panels.panel_tiles();
  return key_tiles_of(params).seen_among(tile.step, panel * panel_tiles, panel_tiles);
}

}  // namespace mk::ring_attention_backward
