// SPDX-License-Identifier: MIT
// From accumulators to the output: bias, accumulation into C, rounding, and stores of whole 128-byte lines
// (element by element at the edge and where rows are not 16-byte aligned). The destination is a pointer, which
// may be a peer's. By TMA, which writes a row's end up to the next 16 bytes, over what is beside the output,
// where that is none of it: tensor_stores.cuh.
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

// Adds the two values of `pair`.
template <class Value>
__device__ __forceinline__ void add_pair(float* sums, uint32_t pair);
template <>
__device__ __forceinline__ void add_pair<__nv_bfloat16>(float* sums, uint32_t pair) {
  sums[0] += __uint_as_float(pair << 16);
  sums[1] += __uint_as_float(pair & 0xffff0000u);
}
template <>
__device__ __forceinline__ void add_pair<__half>(float* sums, uint32_t pair) {
  const float2 values = __half22float2(*reinterpret_cast<const __half2*>(&pair));
  sums[0] += values.x;
  sums[1] += values.y;
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

// A warp's 16 rows of some neighbouring columns, whose rows are so many chunks of 16 bytes; each lane has one
// chunk of some rows.
template <class Out, int COLUMNS>
struct PieceOfRows {
  static constexpr int ROW_BYTES = COLUMNS * sizeof(Out);
  static constexpr int LANES_PER_ROW = ROW_BYTES / 16;
  static constexpr int ELEMENTS_PER_CHUNK = 16 / sizeof(Out);
  static constexpr int ROWS_PER_PASS = 32 / LANES_PER_ROW;
  static constexpr int NUM_PASSES = 16 / ROWS_PER_PASS;

  Out* c;           // the lane's first chunk
  int num_rows;     // from the lane's first row on, that are written
  int num_columns;  // likewise
  bool in_chunks;   // all that is written of rows is aligned chunks
  uint32_t buffer;
  uint8_t* rows;

  // The columns from n + first on; `m`, `n`: first row and column of a tile's `tile_columns`.
  __device__ __forceinline__ PieceOfRows(const EpilogueParams& params, uint8_t* rows, int m, int m_end, int n,
                                         int first, int tile_columns)
      : c(static_cast<Out*>(params.c) + (m + first_row()) * params.ldc + n + first +
          chunk() * ELEMENTS_PER_CHUNK),
        num_columns(params.n - n - first - chunk() * ELEMENTS_PER_CHUNK),
        in_chunks(params.rows_aligned && (params.n % ELEMENTS_PER_CHUNK == 0 || n + tile_columns <= params.n)),
        buffer(ptx::smem_address(rows)),
        rows(rows) {
    num_rows = num_columns > 0 ? m_end - m - first_row() : 0;
  }

  __device__ __forceinline__ static int first_row() { return threadIdx.x % 32 / LANES_PER_ROW; }
  __device__ __forceinline__ static int chunk() { return threadIdx.x % LANES_PER_ROW; }
  __device__ __forceinline__ static uint32_t offset(uint32_t buffer, int row) {
    return swizzled_chunk<ROW_BYTES>(buffer, first_row() + row, chunk());
  }
  // Where they are not, element by element: between C and the buffer. Rolled up: a CTA runs its epilogue a few
  // times, and straight code costs more to fetch than it saves.
  __device__ __forceinline__ void copy_elements_in(int64_t ldc) const {
#pragma unroll 1
    for (int row = 0; row < 16 && row < num_rows; row += ROWS_PER_PASS) {
      Out* const to = reinterpret_cast<Out*>(rows + offset(0, row));
#pragma unroll 1
      for (int i = 0; i < ELEMENTS_PER_CHUNK && i < num_columns; ++i) to[i] = c[row * ldc + i];
    }
  }
  __device__ __forceinline__ void copy_elements_out(int64_t ldc, bool adds) const {
#pragma unroll 1
    for (int row = 0; row < 16 && row < num_rows; row += ROWS_PER_PASS) {
      const Out* const from = reinterpret_cast<const Out*>(rows + offset(0, row));
#pragma unroll 1
      for (int i = 0; i < ELEMENTS_PER_CHUNK && i < num_columns; ++i) {
        Out* const to = c + row * ldc + i;
        if (!adds) *to = from[i];
        if constexpr (sizeof(Out) == 4) {
          if (adds) ptx::red_relaxed_gpu_add(to, from[i]);
        }
      }
    }
  }
};

// 128 bytes of a row at a time, and where there are fewer left 64 or 32.
template <class Out, int LEFT>
constexpr int NEXT_COLUMNS = LEFT * sizeof(Out) >= 128  ? 128 / sizeof(Out)
                             : LEFT * sizeof(Out) >= 64 ? 64 / sizeof(Out)
                                                        : 32 / sizeof(Out);

constexpr int MAX_PASSES = 4;  // of a piece

// What the output has, 16-bit, in the piece from FIRST on, as far as it lies in chunks.
template <class Out, int FIRST, int TILE_COLUMNS>
__device__ __forceinline__ void load_piece(uint4 (&values)[MAX_PASSES], const EpilogueParams& params,
                                           uint8_t* rows, int m, int m_end, int n) {
  if constexpr (FIRST < TILE_COLUMNS) {
    using Piece = PieceOfRows<Out, NEXT_COLUMNS<Out, TILE_COLUMNS - FIRST>>;
    static_assert(Piece::NUM_PASSES <= MAX_PASSES);
    const Piece piece(params, rows, m, m_end, n, FIRST, TILE_COLUMNS);
#pragma unroll
    for (int i = 0; i < Piece::NUM_PASSES; ++i) {
      const int row = i * Piece::ROWS_PER_PASS;
      values[i] = uint4{};
      if (piece.in_chunks && row < piece.num_rows)
        values[i] = *reinterpret_cast<const uint4*>(piece.c + row * params.ldc);
    }
  }
}

// Adds it, and all behind it, through a warp's buffer; `values`: what load_piece() gave. The next piece is on
// its way meanwhile.
template <class Out, int FIRST, int NUM_ACCUMULATORS>
__device__ __forceinline__ void add_columns_from(float (&accumulators)[NUM_ACCUMULATORS],
                                                 const uint4 (&values)[MAX_PASSES],
                                                 const EpilogueParams& params, uint8_t* rows, int m, int m_end,
                                                 int n) {
  static_assert(sizeof(Out) == 2);
  constexpr int TILE_COLUMNS = 2 * NUM_ACCUMULATORS;
  if constexpr (FIRST < TILE_COLUMNS) {
    constexpr int COLUMNS = NEXT_COLUMNS<Out, TILE_COLUMNS - FIRST>;
    using Piece = PieceOfRows<Out, COLUMNS>;
    const Piece piece(params, rows, m, m_end, n, FIRST, TILE_COLUMNS);
    uint4 next[MAX_PASSES];
    load_piece<Out, FIRST + COLUMNS, TILE_COLUMNS>(next, params, rows, m, m_end, n);
    if (piece.in_chunks) {
#pragma unroll
      for (int i = 0; i < Piece::NUM_PASSES; ++i)
        ptx::st_shared_v4(Piece::offset(piece.buffer, i * Piece::ROWS_PER_PASS), values[i]);
    } else {
      piece.copy_elements_in(params.ldc);
    }
    __syncwarp();
    const int matrix = threadIdx.x % 32 / 8;
    const int row = threadIdx.x % 8 + matrix % 2 * 8;
#pragma unroll
    for (int i = 0; i < COLUMNS / 16; ++i) {
      const uint4 pairs =
          ptx::ldmatrix_x4(swizzled_chunk<Piece::ROW_BYTES>(piece.buffer, row, 2 * i + matrix / 2));
      float* const d = accumulators + FIRST / 2 + 8 * i;
      add_pair<Out>(d, pairs.x);
      add_pair<Out>(d + 2, pairs.y);
      add_pair<Out>(d + 4, pairs.z);
      add_pair<Out>(d + 6, pairs.w);
    }
    __syncwarp();
    add_columns_from<Out, FIRST + COLUMNS>(accumulators, next, params, rows, m, m_end, n);
  }
}

// Columns [FIRST, FIRST + COLUMNS) of a warp's rows, through the buffer of `rows`; `m`, `n`: the first row and
// column of all. An fp32 output that is added to is never loaded: the L2 adds, and the warp does not wait.
template <class Out, int FIRST, int COLUMNS, int NUM_ACCUMULATORS>
__device__ __forceinline__ void store_columns(const float (&accumulators)[NUM_ACCUMULATORS],
                                              const EpilogueParams& params, uint8_t* rows, int m, int m_end,
                                              int n) {
  using Piece = PieceOfRows<Out, COLUMNS>;
  const Piece piece(params, rows, m, m_end, n, FIRST, 2 * NUM_ACCUMULATORS);
  constexpr bool IS_FP32 = sizeof(Out) == 4;
  if constexpr (IS_FP32) {
    fill_buffer_fp32<COLUMNS>(accumulators, FIRST / 2, piece.buffer);
  } else {
    fill_buffer_16_bit<Out, COLUMNS>(accumulators, FIRST / 2, piece.buffer);
  }
  __syncwarp();
  const bool adds = IS_FP32 && params.accumulate;
  if (piece.in_chunks) {
#pragma unroll
    for (int row = 0; row < 16; row += Piece::ROWS_PER_PASS) {
      const uint4 value = ptx::ld_shared_v4(Piece::offset(piece.buffer, row));
      Out* const to = piece.c + row * params.ldc;
      if (row < piece.num_rows && !adds) *reinterpret_cast<uint4*>(to) = value;
      if constexpr (IS_FP32) {
        if (row < piece.num_rows && adds) ptx::red_relaxed_gpu_add_v4(to, value);
      }
    }
    return;
  }
  piece.copy_elements_out(params.ldc, adds);
  __syncwarp();
}

// All columns from FIRST on, a piece after the other.
template <class Out, int FIRST, int NUM_BUFFERS, int NUM_ACCUMULATORS>
__device__ __forceinline__ void store_columns_from(const float (&accumulators)[NUM_ACCUMULATORS],
                                                   const EpilogueParams& params,
                                                   EpilogueBuffers<NUM_BUFFERS>& buffers, int m, int m_end,
                                                   int n) {
  constexpr int LEFT = 2 * NUM_ACCUMULATORS - FIRST;
  if constexpr (LEFT > 0) {
    constexpr int COLUMNS = NEXT_COLUMNS<Out, LEFT>;
    // With two buffers, the barrier of one pass keeps the next but one from overwriting what is still being
    // read.
    if (NUM_BUFFERS == 1 && FIRST > 0) __syncwarp();
    store_columns<Out, FIRST, COLUMNS>(accumulators, params,
                                       buffers.rows[FIRST * sizeof(Out) / 128 % NUM_BUFFERS], m, m_end, n);
    store_columns_from<Out, FIRST + COLUMNS>(accumulators, params, buffers, m, m_end, n);
  }
}

// What the output has, 16-bit, to a warp's rows.
template <class Out, int NUM_BUFFERS, int NUM_ACCUMULATORS>
__device__ __forceinline__ void add_to_rows(float (&accumulators)[NUM_ACCUMULATORS],
                                            const EpilogueParams& params, EpilogueBuffers<NUM_BUFFERS>& buffers,
                                            int m, int m_end, int n) {
  uint4 values[MAX_PASSES];
  load_piece<Out, 0, 2 * NUM_ACCUMULATORS>(values, params, buffers.rows[0], m, m_end, n);
  add_columns_from<Out, 0>(accumulators, values, params, buffers.rows[0], m, m_end, n);
}

// `m`, `n`: the warp's first row and column; rows from `m_end` on are not written.
template <class Out, int NUM_BUFFERS, int NUM_ACCUMULATORS>
__device__ __forceinline__ void store_rows(float (&accumulators)[NUM_ACCUMULATORS],
                                           const EpilogueParams& params, EpilogueBuffers<NUM_BUFFERS>& buffers,
                                           int m, int m_end, int n) {
  if constexpr (sizeof(Out) == 2) {
    if (params.accumulate) add_to_rows<Out>(accumulators, params, buffers, m, m_end, n);
  }
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
