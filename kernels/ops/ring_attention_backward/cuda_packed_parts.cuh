// SPDX-License-Identifier: MIT
// Gradients of ring attention over packed sequences: what cuda_parts.cuh says of one sequence.
#pragma once

#include "kernels/ops/ring_attention_backward/cuda_packed_params.h"
#include "kernels/ops/ring_attention_backward/cuda_parts.cuh"

namespace mk::ring_attention_backward {

using ring_attention::IsPacked;

__device__ __forceinline__ PackedKeyTiles key_tiles_of(const PackedParams& params) {
  return {params.tiles.slices, {{params.comm.rank}}, params.panels.num_heads, params.heads_at_once};
}

// By all threads of a CTA, behind begin_packed(): how many heads are in turn depends on how long the sequences
// are, of which tiles of a head share but one: short ones want many, for each begins with tiles that wait for
// each other. A mean length, in which each row counts as one.
template <class Storage>
__device__ inline void choose_heads(Storage& smem) {
  auto& params = smem.params;
  const PackedSlices& slices = params.tiles.slices;
  uint64_t squares = 0;
  for (int i = threadIdx.x; i < slices.num_sequences; i += Storage::NUM_THREADS) {
    const auto rows = static_cast<uint64_t>(slices.cu_seqlens[i + 1] - slices.cu_seqlens[i]);
    squares += rows * rows;
  }
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) squares += __shfl_xor_sync(~0u, squares, distance);
  if (threadIdx.x % 32 == 0) smem.hashes[threadIdx.x / 32] = squares;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int warp = 1; warp < Storage::NUM_WARPS; ++warp) squares += smem.hashes[warp];
    const auto rows = static_cast<int>(squares / static_cast<uint64_t>(most(1, slices.seq)));
    params.heads_at_once = params.panels.heads_at_once(slices.causal, blocks_of(rows / slices.nranks));
  }
  __syncthreads();
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
