// SPDX-License-Identifier: MIT
// What DeferredRows are to other tiles, of those whose rows are the output's columns: rounded and turned round
// at once, they wait in registers.
#pragma once

#include "kernels/device/swapped_epilogue.cuh"

namespace mk {

// A warp's 16 columns of all rows of a tile.
template <int BLOCK_N>
class DeferredColumns {
 public:
  static constexpr int GROUPS_OF_PIECE = 4;  // of eight rows
  static constexpr int NUM_GROUPS = BLOCK_N / 8;
  static constexpr int NUM_PIECES = (NUM_GROUPS + GROUPS_OF_PIECE - 1) / GROUPS_OF_PIECE;

  // The columns, as store_tile_columns() has them. False: columns of this kind cannot wait, and nothing is
  // kept.
  __device__ __forceinline__ bool take(const float (&accumulators)[BLOCK_N / 2], const EpilogueParams& params,
                                       int m, int m_end, int n) {
    if (params.out_type == GemmType::fp32 || params.bias != nullptr || params.accumulate ||
        !params.rows_aligned || n + 16 > params.n) {
      return false;
    }
    if (params.out_type == GemmType::bf16) {
      turn<__nv_bfloat16>(accumulators);
    } else {
      turn<__half>(accumulators);
    }
    const int row = m + static_cast<int>(threadIdx.x) % 32 / 4;
    num_rows_ = m_end - row;
    pitch_ = params.ldc * 2;
    destination_ = static_cast<uint8_t*>(params.c) + row * pitch_ + (n + turned_column()) * 2;
    return true;
  }

  template <int PIECE>
  __device__ __forceinline__ void store() {
    __syncwarp();
#pragma unroll
    for (int i = PIECE * GROUPS_OF_PIECE; i < (PIECE + 1) * GROUPS_OF_PIECE && i < NUM_GROUPS; ++i) {
      if (8 * i < num_rows_) *reinterpret_cast<uint2*>(destination_ + 8 * i * pitch_) = fours_[i];
    }
    if constexpr (PIECE == NUM_PIECES - 1) num_rows_ = 0;
  }

  // All that is left.
  __device__ __forceinline__ void flush() {
    if (!__any_sync(~0u, num_rows_ > 0)) return;
    [&]<int... PIECES>(std::integer_sequence<int, PIECES...>) { (store<PIECES>(), ...); }
    (std::make_integer_sequence<int, NUM_PIECES>());
    __syncwarp();
  }

 private:
  template <class Out>
  __device__ __forceinline__ void turn(const float (&accumulators)[BLOCK_N / 2]) {
#pragma unroll
    for (int i = 0; i < NUM_GROUPS; ++i) fours_[i] = turned<Out>(accumulators + 4 * i);
  }

  uint2 fours_[NUM_GROUPS];
  uint8_t* destination_ = nullptr;
  int64_t pitch_ = 0;
  int num_rows_ = 0;  // from the lane's first on
};

}  // namespace mk
