// SPDX-License-Identifier: MIT
// From accumulators to the output: bias, accumulation into C, rounding, and stores of whole 128-byte lines
// (element by element at the edge and where rows are not 16-byte aligned). The destination is a pointer, which
// may be a peer's. Not by TMA, which writes a row's end up to the next 16 bytes, over what is beside the
// output.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "kernels/device/gemm_epilogue_params.h"
#include "kernels/ptx/memory.cuh"
#include "kernels/ptx/warp.cuh"

namespace mk {

// A warp stores its 16 rows by itself, 128 bytes of each at a time, so that it waits for no other: through two
// buffers, or, where shared memory is short, one.
template <int NUM_>
struct alignas(128) EpilogueBuffers {
  static constexpr int NUM = NUM_;
  uint8_t rows[NUM][16 * 128];
};

template <class Out>
__device__ __forceinline__ uint32_t pack_pair(float low, float high);
template <>
__device__ __forceinline__ uint32_t pack_pair<__nv_bfloat16>(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
template <>
__device__ __forceinline__ uint32_t pack_pair<__half>(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// `row` and `column` are those of the lane's first accumulator (see wgmma.cuh for the layout).
template <class Bias, int NUM_ACCUMULATORS>
__device__ __forceinline__ void add_bias(float (&accumulators)[NUM_ACCUMULATORS], const EpilogueParams& params,
                                         int column) {
  const Bias* bias = static_cast<const Bias*>(params.bias);
#pragma unroll
  for (int i = 0; i < NUM_ACCUMULATORS / 2; ++i) {
    const int n = column + 8 * (i / 2) + i % 2;
    const float value = n < params.n ? static_cast<float>(bias[n]) : 0.0f;
    accumulators[4 * (i / 2) + i % 2] += value;
    accumulators[4 * (i / 2) + 2 + i % 2] += value;
  }
}

template <int NUM_ACCUMULATORS>
__device__ __forceinline__ void add_bias(float (&accumulators)[NUM_ACCUMULATORS], const EpilogueParams& params,
                                         int column) {
  if (params.bias_type == GemmType::bf16) {
    add_bias<__nv_bfloat16>(accumulators, params, column);
  } else if (params.bias_type == GemmType::fp16) {
    add_bias<__half>(accumulators, params, column);
  } else {
    add_bias<float>(accumulators, params, column);
  }
}

template <class Out>
struct alignas(2 * sizeof(Out)) Pair {
  Out x, y;
};

// In aligned rows two neighbours are read together; the last column of an odd n alone. No branches: there would
// be some for every two accumulators, a fifth of a kernel's code.
template <class Out, int NUM_ACCUMULATORS>
__device__ __forceinline__ void add_c(float (&accumulators)[NUM_ACCUMULATORS], const EpilogueParams& params,
                                      int row, int row_end, int column) {
  const Out* c = static_cast<const Out*>(params.c);
#pragma unroll
  for (int i = 0; i < NUM_ACCUMULATORS; i += 2) {
    const int m = row + 8 * (i / 2 % 2);
    const int n = column + 8 * (i / 4);
    const bool has_first = m < row_end && n < params.n;
    const bool has_second = m < row_end && n + 1 < params.n;
    const bool is_pair = has_second && params.rows_aligned;
    const Out* source = c + m * params.ldc + n;
    Pair<Out> pair = {Out(0.0f), Out(0.0f)};
    if (is_pair) pair = *reinterpret_cast<const Pair<Out>*>(source);
    if (has_first && !is_pair) pair.x = source[0];
    if (has_second && !is_pair) pair.y = source[1];
    accumulators[i] += static_cast<float>(pair.x);
    accumulators[i + 1] += static_cast<float>(pair.y);
  }
}

// Address of a 16-byte chunk of a buffer's row, permuted so that neither columns nor rows collide in a bank.
template <int ROW_BYTES>
__device__ __forceinline__ uint32_t swizzled_chunk(uint32_t buffer, int row, int chunk) {
  if constexpr (ROW_BYTES == 128) return buffer + row * 128 + ((chunk ^ (row & 7)) << 4);
  if constexpr (ROW_BYTES == 64) return buffer + row * 64 + ((chunk ^ (row / 2 & 3)) << 4);
  return buffer + row * 32 + ((chunk ^ (row / 4 & 1)) << 4);
}

// COLUMNS columns from accumulator `first` on, as 16-bit values.
template <class Out, int COLUMNS, int NUM_ACCUMULATORS>
__device__ __forceinline__ void fill_buffer_16_bit(const float (&d)[NUM_ACCUMULATORS], int first,
                                                   uint32_t buffer) {
  const int lane = threadIdx.x % 32;
  const int matrix = lane / 8;
  const int row = lane % 8 + matrix % 2 * 8;
#pragma unroll
  for (int i = 0; i < COLUMNS / 16; ++i) {
    const int j = first + 8 * i;
    ptx::stmatrix_x4(swizzled_chunk<COLUMNS * 2>(buffer, row, 2 * i + matrix / 2),
                     pack_pair<Out>(d[j], d[j + 1]), pack_pair<Out>(d[j + 2], d[j + 3]),
                     pack_pair<Out>(d[j + 4], d[j + 5]), pack_pair<Out>(d[j + 6], d[j + 7]));
  }
}

// The same as fp32.
template <int COLUMNS, int NUM_ACCUMULATORS>
__device__ __forceinline__ void fill_buffer_fp32(const float (&d)[NUM_ACCUMULATORS], int first,
                                                 uint32_t buffer) {
  const int lane = threadIdx.x % 32;
  const int row = lane / 4;
#pragma unroll
  for (int i = 0; i < COLUMNS / 8; ++i) {
    const int j = first + 4 * i;
    const int chunk = 2 * i + lane % 4 / 2;
    ptx::st_shared_v2(swizzled_chunk<COLUMNS * 4>(buffer, row, chunk) + lane % 2 * 8, d[j], d[j + 1]);
    ptx::st_shared_v2(swizzled_chunk<COLUMNS * 4>(buffer, row + 8, chunk) + lane % 2 * 8, d[j + 2], d[j + 3]);
  }
}

// Columns [FIRST, FIRST + COLUMNS) of a warp's rows, through the buffer of `rows`; `m`, `n`: the first row and
// column of all.
template <class Out, int FIRST, int COLUMNS, int NUM_ACCUMULATORS>
__device__ __forceinline__ void store_columns(const float (&accumulators)[NUM_ACCUMULATORS],
                                              const EpilogueParams& params, uint8_t* rows, int m, int m_end,
                                              int n) {
  constexpr int ROW_BYTES = COLUMNS * sizeof(Out);
  constexpr int LANES_PER_ROW = ROW_BYTES / 16;
  constexpr int ELEMENTS_PER_CHUNK = 16 / sizeof(Out);
  constexpr int ROWS_PER_PASS = 32 / LANES_PER_ROW;
  const int lane = threadIdx.x % 32;
  const uint32_t buffer = ptx::smem_address(rows);
  if constexpr (sizeof(Out) == 2) {
    fill_buffer_16_bit<Out, COLUMNS>(accumulators, FIRST / 2, buffer);
  } else {
    fill_buffer_fp32<COLUMNS>(accumulators, FIRST / 2, buffer);
  }
  __syncwarp();
  const int first_row = lane / LANES_PER_ROW;
  const int chunk = lane % LANES_PER_ROW;
  const int num_rows = m_end - m - first_row;  // from the lane's first row on
  Out* destination =
      static_cast<Out*>(params.c) + (m + first_row) * params.ldc + n + FIRST + chunk * ELEMENTS_PER_CHUNK;
  if (params.rows_aligned && n + 2 * NUM_ACCUMULATORS <= params.n) {
#pragma unroll
    for (int row = 0; row < 16; row += ROWS_PER_PASS) {
      const uint4 value = ptx::ld_shared_v4(swizzled_chunk<ROW_BYTES>(buffer, first_row + row, chunk));
      if (row < num_rows) *reinterpret_cast<uint4*>(destination + row * params.ldc) = value;
    }
    return;
  }
  // Rolled up: a CTA runs its epilogue a few times, and straight code costs more to fetch than it saves.
  const int num_columns = params.n - n - FIRST - chunk * ELEMENTS_PER_CHUNK;
#pragma unroll 1
  for (int row = 0; row < 16 && row < num_rows; row += ROWS_PER_PASS) {
    const uint32_t offset = swizzled_chunk<ROW_BYTES>(0, first_row + row, chunk);
    const Out* source = reinterpret_cast<const Out*>(rows + offset);
#pragma unroll 1
    for (int element = 0; element < ELEMENTS_PER_CHUNK && element < num_columns; ++element) {
      destination[row * params.ldc + element] = source[element];
    }
  }
  __syncwarp();
}

// All columns from FIRST on: 128 bytes of a row at a time, and where there are fewer left 64 or 32.
template <class Out, int FIRST, int NUM_BUFFERS, int NUM_ACCUMULATORS>
__device__ __forceinline__ void store_columns_from(const float (&accumulators)[NUM_ACCUMULATORS],
                                                   const EpilogueParams& params,
                                                   EpilogueBuffers<NUM_BUFFERS>& buffers, int m, int m_end,
                                                   int n) {
  constexpr int LEFT = 2 * NUM_ACCUMULATORS - FIRST;
  if constexpr (LEFT > 0) {
    constexpr int WIDEST = 128 / sizeof(Out);
    constexpr int COLUMNS = LEFT >= WIDEST ? WIDEST : LEFT >= WIDEST / 2 ? WIDEST / 2 : WIDEST / 4;
    // With two buffers, the barrier of one pass keeps the next but one from overwriting what is still being
    // read.
    if (NUM_BUFFERS == 1 && FIRST > 0) __syncwarp();
    store_columns<Out, FIRST, COLUMNS>(accumulators, params, buffers.rows[FIRST / WIDEST % NUM_BUFFERS], m,
                                       m_end, n);
    store_columns_from<Out, FIRST + COLUMNS>(accumulators, params, buffers, m, m_end, n);
  }
}

// `m`, `n`: the warp's first row and column; rows from `m_end` on are not written.
template <class Out, int NUM_BUFFERS, int NUM_ACCUMULATORS>
__device__ __forceinline__ void store_rows(float (&accumulators)[NUM_ACCUMULATORS],
                                           const EpilogueParams& params, EpilogueBuffers<NUM_BUFFERS>& buffers,
                                           int m, int m_end, int n) {
  const int lane = threadIdx.x % 32;
  if (params.accumulate) add_c<Out>(accumulators, params, m + lane / 4, m_end, n + lane % 4 * 2);
  store_columns_from<Out, 0>(accumulators, params, buffers, m, m_end, n);
  __syncwarp();
}

// One warp's 16 rows of a tile, the first at (m, n) of the output, as far as they lie before `m_end`.
//
// All its threads have `m` alike, and the vote tells the compiler. Around barriers and votes it must see that a
// branch or a loop does not part a warp: if it does not, it takes the warp for parted from there to the end of
// the loop over the tiles, and keeps the mainloop's stages and descriptors in vector registers, four moves
// (R2UR) to a wgmma.
template <int NUM_BUFFERS, int NUM_ACCUMULATORS>
__device__ __forceinline__ void store_tile_rows(float (&accumulators)[NUM_ACCUMULATORS],
                                                const EpilogueParams& params,
                                                EpilogueBuffers<NUM_BUFFERS>& buffers, int m, int m_end,
                                                int n) {
  if (!__any_sync(~0u, m < m_end)) return;
  if (params.bias != nullptr) add_bias(accumulators, params, n + threadIdx.x % 4 * 2);
  if (params.out_type == GemmType::bf16) {
    store_rows<__nv_bfloat16>(accumulators, params, buffers, m, m_end, n);
  } else if (params.out_type == GemmType::fp16) {
    store_rows<__half>(accumulators, params, buffers, m, m_end, n);
  } else {
    store_rows<float>(accumulators, params, buffers, m, m_end, n);
  }
}

}  // namespace mk
