// SPDX-License-Identifier: MIT
// The epilogue of a tile whose rows are the output's columns (gemm_swapped_kernel.cuh): what a lane has lies in
// one column, and is turned round between the lanes of a warp.
#pragma once

#include "kernels/device/gemm_epilogue.cuh"

namespace mk {

template <class Value>
__device__ __forceinline__ float value_of_column(const void* values, int n, int num_columns) {
  return n < num_columns ? static_cast<float>(static_cast<const Value*>(values)[n]) : 0.0f;
}

__device__ __forceinline__ float bias_of_column(const EpilogueParams& params, int n) {
  if (params.bias_type == GemmType::bf16) return value_of_column<__nv_bfloat16>(params.bias, n, params.n);
  if (params.bias_type == GemmType::fp16) return value_of_column<__half>(params.bias, n, params.n);
  return value_of_column<float>(params.bias, n, params.n);
}

// Of eight rows of 16 columns a lane has, in `d`, two neighbouring rows of a column and of the one eight
// further, and turns them, 16-bit, into two columns of a row, and with its neighbour's into four: row lane / 4
// from turned_column() on.
template <class Out>
__device__ __forceinline__ uint2 turned(const float* d) {
  const bool is_odd = threadIdx.x % 2 != 0;
  const uint32_t low = ptx::movmatrix_trans(pack_pair<Out>(d[0], d[1]));
  const uint32_t high = ptx::movmatrix_trans(pack_pair<Out>(d[2], d[3]));
  const uint32_t other = __shfl_xor_sync(~0u, is_odd ? low : high, 1);
  return is_odd ? make_uint2(other, high) : make_uint2(low, other);
}

__device__ __forceinline__ int turned_column() {
  const int lane = threadIdx.x % 32;
  return lane % 2 != 0 ? 8 + (lane % 4 - 1) * 2 : lane % 4 * 2;
}

// The other way round: adds to `d` what turned() would have made `four`.
template <class Out>
__device__ __forceinline__ void add_turned(float* d, const uint2& four) {
  const bool is_odd = threadIdx.x % 2 != 0;
  const uint32_t other = __shfl_xor_sync(~0u, is_odd ? four.x : four.y, 1);
  add_pair<Out>(d, ptx::movmatrix_trans(is_odd ? other : four.x));
  add_pair<Out>(d + 2, ptx::movmatrix_trans(is_odd ? four.y : other));
}

// What the output has, 16-bit; arguments as store_columns_16_bit() has them.
template <class Out, int NUM_ACCUMULATORS>
__device__ __forceinline__ void add_columns_16_bit(float (&d)[NUM_ACCUMULATORS], const EpilogueParams& params,
                                                   int m, int m_end, int n) {
  constexpr int BATCH = 10;  // loads on their way at a time
  const int row = m + static_cast<int>(threadIdx.x) % 32 / 4;
  const int column = n + turned_column();
  const Out* source = static_cast<const Out*>(params.c) + row * params.ldc + column;
  const bool in_fours = params.rows_aligned && (params.n % 4 == 0 || n + 16 <= params.n);
#pragma unroll
  for (int first = 0; first < NUM_ACCUMULATORS / 4; first += BATCH) {
    uint2 fours[BATCH];
#pragma unroll
    for (int i = 0; i < BATCH && first + i < NUM_ACCUMULATORS / 4; ++i) {
      const bool has_row = row + 8 * (first + i) < m_end && column < params.n;
      const Out* const from = source + 8 * (first + i) * params.ldc;
      fours[i] = uint2{};
      if (has_row && in_fours) fours[i] = *reinterpret_cast<const uint2*>(from);
      if (has_row && !in_fours) {
        uint64_t four = 0;
#pragma unroll 1
        for (int j = 0; j < 4 && column + j < params.n; ++j)
          four |= uint64_t{reinterpret_cast<const uint16_t*>(from)[j]} << 16 * j;
        fours[i] = make_uint2(static_cast<uint32_t>(four), static_cast<uint32_t>(four >> 32));
      }
    }
#pragma unroll
    for (int i = 0; i < BATCH && first + i < NUM_ACCUMULATORS / 4; ++i)
      add_turned<Out>(d + 4 * (first + i), fours[i]);
  }
}

// Eight rows of 16 columns at a time.
template <class Out, int NUM_ACCUMULATORS>
__device__ __forceinline__ void store_columns_16_bit(const float (&d)[NUM_ACCUMULATORS],
                                                     const EpilogueParams& params, int m, int m_end, int n) {
  const int row = m + static_cast<int>(threadIdx.x) % 32 / 4;
  const int column = n + turned_column();
  Out* destination = static_cast<Out*>(params.c) + row * params.ldc + column;
  const bool in_fours = params.rows_aligned && (params.n % 4 == 0 || n + 16 <= params.n);
#pragma unroll
  for (int i = 0; i < NUM_ACCUMULATORS / 4; ++i) {
    const uint2 four = turned<Out>(d + 4 * i);
    const bool has_row = row + 8 * i < m_end && column < params.n;
    Out* const to = destination + 8 * i * params.ldc;
    if (has_row && in_fours) *reinterpret_cast<uint2*>(to) = four;
    if (has_row && !in_fours) {
      // Rolled up, for there are many of these.
      uint64_t left = uint64_t{four.y} << 32 | four.x;
#pragma unroll 1
      for (int j = 0; j < 4 && column + j < params.n; ++j, left >>= 16) {
        reinterpret_cast<uint16_t*>(to)[j] = static_cast<uint16_t>(left);
      }
    }
  }
}

// Where C is added to, the L2 adds.
template <int NUM_ACCUMULATORS>
__device__ __forceinline__ void store_columns_fp32(const float (&d)[NUM_ACCUMULATORS],
                                                   const EpilogueParams& params, int row, int row_end,
                                                   int column) {
#pragma unroll
  for (int i = 0; i < NUM_ACCUMULATORS; ++i) {
    const int m = row + 8 * (i / 4) + i % 2;
    const int n = column + 8 * (i / 2 % 2);
    float* const to = static_cast<float*>(params.c) + m * params.ldc + n;
    if (m < row_end && n < params.n && !params.accumulate) *to = d[i];
    if (m < row_end && n < params.n && params.accumulate) ptx::red_relaxed_gpu_add(to, d[i]);
  }
}

template <class Out, int NUM_ACCUMULATORS>
__device__ __forceinline__ void finish_columns_16_bit(float (&accumulators)[NUM_ACCUMULATORS],
                                                      const EpilogueParams& params, int m, int m_end, int n) {
  if (params.accumulate) add_columns_16_bit<Out>(accumulators, params, m, m_end, n);
  store_columns_16_bit<Out>(accumulators, params, m, m_end, n);
}

// One warp's 16 columns of the output, from `n` on, in the rows from `m` on, as far as they lie before `m_end`.
template <int NUM_ACCUMULATORS>
__device__ __forceinline__ void store_tile_columns(float (&accumulators)[NUM_ACCUMULATORS],
                                                   const EpilogueParams& params, int m, int m_end, int n) {
  if (!__any_sync(~0u, n < params.n)) return;
  const int lane = threadIdx.x % 32;
  const int row = m + lane % 4 * 2, column = n + lane / 4;
  if (params.bias != nullptr) {
    const float of_first = bias_of_column(params, column), of_second = bias_of_column(params, column + 8);
#pragma unroll
    for (int i = 0; i < NUM_ACCUMULATORS; ++i) accumulators[i] += i / 2 % 2 == 0 ? of_first : of_second;
  }
  if (params.out_type == GemmType::bf16) {
    finish_columns_16_bit<__nv_bfloat16>(accumulators, params, m, m_end, n);
  } else if (params.out_type == GemmType::fp16) {
    finish_columns_16_bit<__half>(accumulators, params, m, m_end, n);
  } else {
    store_columns_fp32(accumulators, params, row, m_end, column);
  }
  __syncwarp();
}

}  // namespace mk
