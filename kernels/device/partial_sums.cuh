// SPDX-License-Identifier: MIT
// The end of a reduction over ranks, in the epilogue of the owner's own tile: its partial, rounded as the
// others' are, and theirs from the slots they pushed them into, summed in fp32 in the order of ranks.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/device/gemm_epilogue.cuh"

namespace mk {

struct PartialSlots {
  const std::byte* base;  // this rank's receive area
  int64_t slot_bytes;
  int64_t pitch;  // bytes
  int rank;
  int nranks;
};

// Where finished rows go: C, and, for an all-reduce, the same place of every peer's receive area.
struct FinishedRows {
  const EpilogueParams& output;
  int64_t c_row;            // row of C that the owner's first row is
  bool rounds_first;        // the all-reduce rounds before it adds to C, so that all ranks add the same
  std::byte* const* peers;  // receive area of each rank at its finished rows, or null
  int64_t peer_offset;
  int64_t peer_pitch;
};

template <int N>
__device__ __forceinline__ void add_elements(float (&sums)[N], uint4 chunk, GemmType type) {
  const uint32_t words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
  if constexpr (N == 4) {
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[i] += __uint_as_float(words[i]);
  } else if (type == GemmType::bf16) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sums[2 * i] += __uint_as_float(words[i] << 16);
      sums[2 * i + 1] += __uint_as_float(words[i] & 0xffff0000u);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&words[i]));
      sums[2 * i] += pair.x;
      sums[2 * i + 1] += pair.y;
    }
  }
}

template <class T, int N>
struct alignas(N * sizeof(T) > 16 ? 16 : N * sizeof(T)) Elements {
  T at[N];
};

template <class Out, int N>
__device__ __forceinline__ void store_elements(Out* at, const Elements<Out, N>& values, int count,
                                               bool aligned) {
  if (aligned && count >= N) {
    *reinterpret_cast<Elements<Out, N>*>(at) = values;
    return;
  }
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if (i < count) at[i] = values.at[i];
  }
}

__device__ __forceinline__ float load_bias(const EpilogueParams& params, int column) {
  if (params.bias_type == GemmType::bf16) return static_cast<const __nv_bfloat16*>(params.bias)[column];
  if (params.bias_type == GemmType::fp16) return static_cast<const __half*>(params.bias)[column];
  return static_cast<const float*>(params.bias)[column];
}

// N sums of the owner's row `row` from `column` on, of which `count` are inside.
template <class Out, int N>
__device__ __forceinline__ void finish_elements(const FinishedRows& to, float (&sums)[N], int64_t row,
                                                int column, int count, const PartialSlots& slots) {
  const EpilogueParams& output = to.output;
  if (output.bias != nullptr) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (i < count) sums[i] += load_bias(output, column + i);
    }
  }
  Out* c = static_cast<Out*>(output.c) + (to.c_row + row) * output.ldc + column;
  Elements<Out, N> values;
#pragma unroll
  for (int i = 0; i < N; ++i) values.at[i] = static_cast<Out>(sums[i]);
  if (to.peers != nullptr) {
    // Whole chunks: rows of the receive areas are padded to 16 bytes.
    const int64_t offset = to.peer_offset + row * to.peer_pitch + column * int64_t{sizeof(Out)};
    for (int step = 1; step < slots.nranks; ++step) {
      const int peer = slots.rank + step < slots.nranks ? slots.rank + step : slots.rank + step - slots.nranks;
      store_elements(reinterpret_cast<Out*>(to.peers[peer] + offset), values, count, true);
    }
  }
  if (output.accumulate) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float before = i < count ? static_cast<float>(c[i]) : 0.0f;
      values.at[i] = static_cast<Out>((to.rounds_first ? static_cast<float>(values.at[i]) : sums[i]) + before);
    }
  }
  store_elements(c, values, count, output.rows_aligned);
}

// One pass over COLUMNS columns of a warp's 16 rows, whose own partials lie packed in `buffer`. N elements make
// 16 bytes of a partial. `row`: the warp's first, of the owner's; rows from row_end on do not exist.
template <int COLUMNS, int N>
__device__ __forceinline__ void reduce_pass(const PartialSlots& slots, const FinishedRows& to,
                                            GemmType comm_type, uint32_t buffer, int64_t row, int64_t row_end,
                                            int column) {
  constexpr int ROW_BYTES = COLUMNS * 16 / N;
  constexpr int LANES_PER_ROW = ROW_BYTES / 16;
  constexpr int ROWS_PER_PASS = 32 / LANES_PER_ROW;
  constexpr int GROUP = 4;  // sources read together
  const int lane = threadIdx.x % 32;
  const int chunk = lane % LANES_PER_ROW;
  const int lane_row = lane / LANES_PER_ROW;
  const int lane_column = column + chunk * N;
  const int count = to.output.n - lane_column;
  if (count <= 0) return;
    // Rolled up: straight code for every row is slow to fetch, and slower to compile.
#pragma unroll 1
  for (int first_row = lane_row; first_row < 16 && row + first_row < row_end; first_row += ROWS_PER_PASS) {
    const std::byte* partials = slots.base + (row + first_row) * slots.pitch + lane_column * int64_t{16 / N};
    float sums[N] = {};
#pragma unroll 1
    for (int first = 0; first < slots.nranks; first += GROUP) {
      uint4 chunks[GROUP];
#pragma unroll
      for (int g = 0; g < GROUP; ++g) {
        const int source = first + g;
        chunks[g] = make_uint4(0, 0, 0, 0);
        if (source == slots.rank) {
          chunks[g] = ptx::ld_shared_v4(swizzled_chunk<ROW_BYTES>(buffer, first_row, chunk));
        } else if (source < slots.nranks) {
          chunks[g] = *reinterpret_cast<const uint4*>(partials + source * slots.slot_bytes);
        }
      }
#pragma unroll
      for (int g = 0; g < GROUP; ++g) add_elements(sums, chunks[g], comm_type);
    }
    if (to.output.out_type == GemmType::bf16) {
      finish_elements<__nv_bfloat16>(to, sums, row + first_row, lane_column, count, slots);
    } else if (to.output.out_type == GemmType::fp16) {
      finish_elements<__half>(to, sums, row + first_row, lane_column, count, slots);
    } else {
      finish_elements<float>(to, sums, row + first_row, lane_column, count, slots);
    }
  }
}

// One warp's 16 rows of the owner's tile. The peers' flags have been seen by every lane.
template <int NUM_ACCUMULATORS>
__device__ __forceinline__ void reduce_tile_rows(const float (&accumulators)[NUM_ACCUMULATORS],
                                                 const PartialSlots& slots, const FinishedRows& to,
                                                 GemmType comm_type, EpilogueBuffers& buffers, int64_t row,
                                                 int64_t row_end, int column) {
  constexpr int BLOCK_N = 2 * NUM_ACCUMULATORS;
  if (row >= row_end) return;
  if (comm_type == GemmType::fp32) {
#pragma unroll
    for (int i = 0; i < BLOCK_N / 32; ++i) {
      const uint32_t buffer = ptx::smem_address(buffers.rows[i % 2]);
      fill_buffer_fp32(accumulators, i * 16, buffer);
      __syncwarp();
      reduce_pass<32, 4>(slots, to, comm_type, buffer, row, row_end, column + i * 32);
    }
  } else {
    constexpr int COLUMNS = BLOCK_N % 64 == 0 ? 64 : 32;
#pragma unroll
    for (int i = 0; i < BLOCK_N / COLUMNS; ++i) {
      const uint32_t buffer = ptx::smem_address(buffers.rows[i % 2]);
      if (comm_type == GemmType::bf16) {
        fill_buffer_16_bit<__nv_bfloat16, COLUMNS>(accumulators, i * COLUMNS / 2, buffer);
      } else {
        fill_buffer_16_bit<__half, COLUMNS>(accumulators, i * COLUMNS / 2, buffer);
      }
      __syncwarp();
      reduce_pass<COLUMNS, 8>(slots, to, comm_type, buffer, row, row_end, column + i * COLUMNS);
    }
  }
  __syncwarp();
}

}  // namespace mk
