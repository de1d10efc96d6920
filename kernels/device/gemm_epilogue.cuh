// SPDX-License-Identifier: MIT
// From accumulators to the output: bias, accumulation into C, rounding, and a store by TMA (element by element where
// the output's rows do not begin or end at 16 bytes). The destination is a tensor map and a pointer, which may be
// a peer's memory.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "kernels/gemm/gemm_plan.h"
#include "kernels/ptx/memory.cuh"
#include "kernels/ptx/tma.cuh"
#include "kernels/ptx/warp.cuh"

namespace mk {

// What the epilogue needs beside the accumulators. m and n bound what is written.
struct EpilogueParams {
  void* c;
  int64_t ldc;  // elements
  const void* bias;
  int m;
  int n;
  GemmType out_type;
  GemmType bias_type;
  bool accumulate;
  bool rows_aligned;  // 16-byte aligned rows
  // Columns below this are stored by TMA, whose map must end here: a multiple of 16 bytes, since TMA writes
  // whole 16-byte pieces and would run over the row's end. The rest is stored element by element.
  int n_tma;
};

// A warp stores its 16 rows by itself, 128 bytes of each at a time, through two buffers, so that it waits for no
// other warp, and TMA reads one buffer while the other is filled.
constexpr int EPILOGUE_ROWS = 16;
constexpr int EPILOGUE_ROW_BYTES = 128;
struct alignas(1024) EpilogueBuffers {
  uint8_t rows[2][EPILOGUE_ROWS * EPILOGUE_ROW_BYTES];
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

// In aligned rows two neighbours are read together; the last column of an odd n alone.
template <class Out, int NUM_ACCUMULATORS>
__device__ __forceinline__ void add_c(float (&accumulators)[NUM_ACCUMULATORS], const EpilogueParams& params,
                                      int row, int column) {
  const Out* c = static_cast<const Out*>(params.c);
#pragma unroll
  for (int i = 0; i < NUM_ACCUMULATORS; i += 2) {
    const int m = row + 8 * (i / 2 % 2);
    const int n = column + 8 * (i / 4);
    if (m >= params.m || n >= params.n) continue;
    const Out* source = c + m * params.ldc + n;
    if (params.rows_aligned && n + 1 < params.n) {
      const Pair<Out> pair = *reinterpret_cast<const Pair<Out>*>(source);
      accumulators[i] += static_cast<float>(pair.x);
      accumulators[i + 1] += static_cast<float>(pair.y);
    } else {
      accumulators[i] += static_cast<float>(source[0]);
      if (n + 1 < params.n) accumulators[i + 1] += static_cast<float>(source[1]);
    }
  }
}

template <class Out, int NUM_ACCUMULATORS>
__device__ __forceinline__ void store_predicated(const float (&accumulators)[NUM_ACCUMULATORS],
                                                 const EpilogueParams& params, int row, int column) {
  Out* c = static_cast<Out*>(params.c);
#pragma unroll
  for (int i = 0; i < NUM_ACCUMULATORS; ++i) {
    const int m = row + 8 * (i / 2 % 2);
    const int n = column + 8 * (i / 4) + i % 2;
    if (m < params.m && n >= params.n_tma && n < params.n) c[m * params.ldc + n] = static_cast<Out>(accumulators[i]);
  }
}

// Address of a 16-byte chunk of a buffer's row under TMA's 128-byte swizzle.
__device__ __forceinline__ uint32_t swizzled_chunk(uint32_t buffer, int row, int chunk) {
  return buffer + row * EPILOGUE_ROW_BYTES + ((chunk ^ (row & 7)) << 4);
}

// 64 columns from accumulator `first` on, as 16-bit values.
template <class Out, int NUM_ACCUMULATORS>
__device__ __forceinline__ void fill_buffer_16_bit(const float (&d)[NUM_ACCUMULATORS], int first, uint32_t buffer) {
  const int lane = threadIdx.x % 32;
  const int matrix = lane / 8;
  const int row = lane % 8 + matrix % 2 * 8;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int j = first + 8 * i;
    ptx::stmatrix_x4(swizzled_chunk(buffer, row, 2 * i + matrix / 2), pack_pair<Out>(d[j], d[j + 1]),
                     pack_pair<Out>(d[j + 2], d[j + 3]), pack_pair<Out>(d[j + 4], d[j + 5]),
                     pack_pair<Out>(d[j + 6], d[j + 7]));
  }
}

// 32 columns from accumulator `first` on, as fp32.
template <int NUM_ACCUMULATORS>
__device__ __forceinline__ void fill_buffer_fp32(const float (&d)[NUM_ACCUMULATORS], int first, uint32_t buffer) {
  const int lane = threadIdx.x % 32;
  const int row = lane / 4;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int j = first + 4 * i;
    const int chunk = 2 * i + lane % 4 / 2;
    ptx::st_shared_v2(swizzled_chunk(buffer, row, chunk) + lane % 2 * 8, d[j], d[j + 1]);
    ptx::st_shared_v2(swizzled_chunk(buffer, row + 8, chunk) + lane % 2 * 8, d[j + 2], d[j + 3]);
  }
}

// `m`, `n`: the warp's first row and column. The stores are in flight on return; `drain_stores` waits for them.
template <class Out, int NUM_ACCUMULATORS>
__device__ __forceinline__ void store_tma(const float (&accumulators)[NUM_ACCUMULATORS],
                                          const EpilogueParams& params, const CUtensorMap* map_c,
                                          EpilogueBuffers& buffers, int m, int n) {
  constexpr int COLUMNS = EPILOGUE_ROW_BYTES / sizeof(Out);
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < NUM_ACCUMULATORS * 2 / COLUMNS; ++i) {
    if (n + i * COLUMNS >= params.n_tma) break;
    uint8_t* buffer = buffers.rows[i % 2];
    // The tile before may have ended on either buffer.
    if (lane == 0) {
      if (i == 0) {
        ptx::cp_async_bulk_wait_group_read<0>();
      } else {
        ptx::cp_async_bulk_wait_group_read<1>();
      }
    }
    __syncwarp();
    if constexpr (sizeof(Out) == 2) {
      fill_buffer_16_bit<Out>(accumulators, i * COLUMNS / 2, ptx::smem_address(buffer));
    } else {
      fill_buffer_fp32(accumulators, i * COLUMNS / 2, ptx::smem_address(buffer));
    }
    ptx::fence_proxy_async_shared_cta();
    __syncwarp();
    if (lane == 0) {
      ptx::cp_async_bulk_tensor_2d_global_shared(map_c, buffer, n + i * COLUMNS, m);
      ptx::cp_async_bulk_commit_group();
    }
  }
}

template <class Out, int NUM_ACCUMULATORS>
__device__ __forceinline__ void store_rows(float (&accumulators)[NUM_ACCUMULATORS], const EpilogueParams& params,
                                           const CUtensorMap* map_c, EpilogueBuffers& buffers, int m, int n) {
  const int lane = threadIdx.x % 32;
  if (params.accumulate) add_c<Out>(accumulators, params, m + lane / 4, n + lane % 4 * 2);
  store_tma<Out>(accumulators, params, map_c, buffers, m, n);
  if (params.n_tma < params.n && n + 2 * NUM_ACCUMULATORS > params.n_tma) {
    store_predicated<Out>(accumulators, params, m + lane / 4, n + lane % 4 * 2);
  }
}

// One warp's 16 rows of a tile, the first at (m, n) of the output.
template <int NUM_ACCUMULATORS>
__device__ __forceinline__ void store_tile_rows(float (&accumulators)[NUM_ACCUMULATORS],
                                                const EpilogueParams& params, const CUtensorMap* map_c,
                                                EpilogueBuffers& buffers, int m, int n) {
  const int lane = threadIdx.x % 32;
  if (m >= params.m) return;
  if (params.bias != nullptr) add_bias(accumulators, params, n + lane % 4 * 2);
  if (params.out_type == GemmType::bf16) {
    store_rows<__nv_bfloat16>(accumulators, params, map_c, buffers, m, n);
  } else if (params.out_type == GemmType::fp16) {
    store_rows<__half>(accumulators, params, map_c, buffers, m, n);
  } else {
    store_rows<float>(accumulators, params, map_c, buffers, m, n);
  }
}

// By every warp that stored, before its CTA ends.
__device__ __forceinline__ void drain_stores() {
  if (threadIdx.x % 32 == 0) ptx::cp_async_bulk_wait_group<0>();
}

}  // namespace mk
