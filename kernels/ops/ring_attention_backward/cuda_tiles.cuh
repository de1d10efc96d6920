// SPDX-License-Identifier: MIT
// Gradients of ring attention: what streams past a tile of keys, and what of it the keys hide. Kernels of
// packed sequences have other answers (cuda_packed_tiles.cuh).
#pragma once

#include "kernels/device/attention_joint_gradients.cuh"
#include "kernels/ops/ring_attention_backward/cuda_params.h"
#include "kernels/ptx/tma.cuh"

namespace mk::ring_attention_backward {

template <class Params>
__device__ __forceinline__ const CUtensorMap* query_map(const Params& params, bool d_o) {
  return d_o ? &params.map_d_o : &params.map_q;
}

template <class Params>
__device__ __forceinline__ void prefetch_maps(const Params& params) {
  for (const CUtensorMap* map : {&params.map_q, &params.map_d_o, &params.map_k, &params.map_v})
    ptx::prefetch_tensormap(map);
}

template <class Params>
__device__ __forceinline__ QueryBlockWalk query_walk(const Params& params, const KeyTile& tile) {
  return {params.tiles.slices, params.comm.rank, tile.position};
}

__device__ __forceinline__ CircularQueryWalk query_walk(const CircularParams& params, const KeyTile& tile) {
  return {params.key_tiles, tile};
}

// As consumers are told of a block.
__device__ __forceinline__ StreamedBlock streamed(const QueryBlock& block, int num_left) {
  return {block.position, block.num_rows, num_left};
}

// Sets to zero, of a thread's two rows, what lies outside columns [begin, end) of the first, and of the second.
template <int NUM_WEIGHTS>
__device__ __forceinline__ void mask_columns(float (&weights)[NUM_WEIGHTS], int begin0, int begin1, int end0,
                                             int end1) {
  const int first = threadIdx.x % 4 * 2;
#pragma unroll
  for (int i = 0; i < NUM_WEIGHTS; ++i) {
    const int column = first + i / 4 * 8 + i % 2;
    const bool is_second = i / 2 % 2 != 0;
    if (column < (is_second ? begin1 : begin0) || column >= (is_second ? end1 : end0)) weights[i] = 0.0f;
  }
}

// A thread's first row of its warpgroup's 64; the second is 8 further on.
__device__ __forceinline__ int row_of_thread() { return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4; }

// Of a thread's two keys, which queries see them: these and those behind them.
class KeyMask {
 public:
  template <class Params>
  __device__ __forceinline__ KeyMask(const Params& params, const KeyTile& tile, int warpgroup)
      : slices_(params.tiles.slices),
        num_rows_(tile.num_rows - warpgroup * BLOCK_ROWS),
        position_(tile.position + warpgroup * BLOCK_ROWS + row_of_thread()) {}

  __device__ __forceinline__ bool is_used() const { return num_rows_ > 0; }
  template <int NUM_WEIGHTS>
  __device__ __forceinline__ void operator()(float (&weights)[NUM_WEIGHTS], const StreamedBlock& block) const {
    // Before the warpgroup's last key?
    const bool hides = slices_.causal && block.position < position_ - row_of_thread() + BLOCK_ROWS - 1;
    if (!hides && block.num_rows == BLOCK_ROWS && num_rows_ >= BLOCK_ROWS) return;
    const int begin = hides ? position_ - block.position : -8;
    mask_columns(weights, begin, begin + 8, row_of_thread() < num_rows_ ? block.num_rows : 0,
                 row_of_thread() + 8 < num_rows_ ? block.num_rows : 0);
  }

 private:
  const CudaSlices& slices_;
  const int num_rows_;  // of the tile, from the warpgroup's on
  const int position_;  // of the thread's first key
};

template <class Params>
__device__ __forceinline__ KeyMask key_mask(const Params& params, const KeyTile& tile, int warpgroup) {
  return {params, tile, warpgroup};
}

}  // namespace mk::ring_attention_backward
