// SPDX-License-Identifier: MIT
// Gradients of ring attention over packed sequences: what cuda_tiles.cuh says of one sequence.
#pragma once

#include "kernels/ops/ring_attention_backward/cuda_packed_parts.cuh"
#include "kernels/ops/ring_attention_backward/cuda_tiles.cuh"

namespace mk::ring_attention_backward {

template <IsPacked Params>
__device__ __forceinline__ const CUtensorMap* query_map(const Params& params, bool d_o) {
  return params.maps[d_o ? PACKED_D_O : ring_attention::PACKED_Q];
}

// Those that the kernel has made are in global memory, whence nothing prefetches them.
template <IsPacked Params>
__device__ __forceinline__ void prefetch_maps(const Params&) {}

template <IsPacked Params>
__device__ __forceinline__ PackedQueryBlockWalk query_walk(const Params& params, const KeyTile& tile) {
  return {params.tiles.slices, params.comm.rank, source_of(params, tile.step), PackedKeyTiles::rows_of(tile)};
}

// `position`: the first row; `num_rows`: none, if something is to be hidden.
__device__ __forceinline__ StreamedBlock streamed(const PackedQueryBlock& block, int num_left) {
  return {block.row, block.is_masked ? 0 : BLOCK_ROWS, num_left};
}

// Of a thread's two keys, which queries see them: rows of this rank. The lanes of a quad have the same keys,
// and each one of the four bounds.
class PackedKeyMask {
 public:
  template <class Params>
  __device__ __forceinline__ PackedKeyMask(const Params& params, const KeyTile& tile, int warpgroup)
      : is_used_(tile.num_rows > warpgroup * BLOCK_ROWS) {
    const PackedSlices& slices = params.tiles.slices;
    const int source = source_of(params, tile.step), bound = threadIdx.x % 4;
    const int key = warpgroup * BLOCK_ROWS + row_of_thread() + bound / 2 * 8;
    if (key >= tile.num_rows) return;
    const ring_attention::PackedRow place = packed_row(slices, source, tile.index * TILE_ROWS + key);
    const RowRange seeing = slices.seeing_rows(params.comm.rank, place.sequence, place.position);
    bound_ = bound % 2 == 0 ? seeing.begin : seeing.end;
  }

  __device__ __forceinline__ bool is_used() const { return is_used_; }
  template <int NUM_WEIGHTS>
  __device__ __forceinline__ void operator()(float (&weights)[NUM_WEIGHTS], const StreamedBlock& block) const {
    if (block.num_rows == BLOCK_ROWS) return;
    int bounds[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) bounds[i] = __shfl_sync(~0u, bound_, i, 4) - block.position;
    mask_columns(weights, bounds[0], bounds[2], bounds[1], bounds[3]);
  }

 private:
  const bool is_used_;
  int bound_ = 0;
};

template <IsPacked Params>
__device__ __forceinline__ PackedKeyMask key_mask(const Params& params, const KeyTile& tile, int warpgroup) {
  return {params, tile, warpgroup};
}

}  // namespace mk::ring_attention_backward
