// SPDX-License-Identifier: MIT
// Sums of partial tiles on the host: a slab is 16 rows of BLOCK_N numbers, one row after the other; fp32 alone.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <array>

#include "kernels/device/gemm_epilogue.cuh"
#include "shim/device_words.h"

namespace mk {

template <int NUM_>
struct EpilogueBuffers {
  uint8_t rows[NUM_][16];
};

template <int BLOCK_N>
constexpr int slab_bytes(int element_bytes) {
  return 16 * BLOCK_N * element_bytes;
}

struct PartialSlabs {
  const std::byte* first;
  int64_t slot_bytes;
  int nranks;
  float sum(int index) const {
    float total = 0;
    for (int source = 0; source < nranks; ++source) {
      float value;
      std::memcpy(&value, first + source * slot_bytes + index * 4, sizeof value);
      total += value;
    }
    return total;
  }
};

// Number lane + 32 * i of the slab is the lane's accumulator i.
template <int N>
void store_slab(const float (&accumulators)[N], GemmType, std::byte* slab) {
  for (int i = 0; i < N; ++i) reinterpret_cast<float*>(slab)[threadIdx.x % 32 + 32 * i] = accumulators[i];
}

template <class T>
struct PartialChunk {
  static constexpr int NUM = 4;
  static void add(float* sums, uint4 chunk) {
    float values[NUM];
    std::memcpy(values, &chunk, sizeof values);
    for (int i = 0; i < NUM; ++i) sums[i] += values[i];
  }
  static void add_pair(float* sums, uint32_t word) {
    const auto pair = std::bit_cast<std::array<T, 2>>(word);
    for (int i = 0; i < 2; ++i) sums[i] += static_cast<float>(pair[i]);
  }
  static uint4 pack(const float* sums) {
    uint4 chunk;
    std::memcpy(&chunk, sums, sizeof chunk);
    return chunk;
  }
};

template <int BLOCK_N>
void sum_slab(const PartialSlabs& slabs, GemmType, std::byte* to) {
  for (int index = static_cast<int>(threadIdx.x % 32); index < 16 * BLOCK_N; index += 32) {
    const float sum = slabs.sum(index);
    std::memcpy(to + index * 4, &sum, sizeof sum);
  }
}

template <int BLOCK_N>
constexpr int SUM_COLUMNS = BLOCK_N % 64 == 0 ? 64 : 32;

// Named by the kernel of one node, which is not emulated.
template <int BLOCK_N, class COf>
void finish_columns(const PartialSlabs&, GemmType, const EpilogueParams&, bool, int, const COf&,
                    EpilogueBuffers<1>&, int, int, int, int);

template <int BLOCK_N>
void finish_slab(const PartialSlabs& slabs, GemmType, const EpilogueParams& output, bool, EpilogueBuffers<1>&,
                 int row, int row_end, int column) {
  for (int index = static_cast<int>(threadIdx.x % 32); index < 16 * BLOCK_N; index += 32) {
    const int m = row + index / BLOCK_N, n = column + index % BLOCK_N;
    if (m < row_end && n < output.n) static_cast<float*>(output.c)[m * output.ldc + n] = slabs.sum(index);
  }
}

// Whole numbers have nothing to round, and C is fp32 whatever its type.
template <int N>
void round_result(float (&)[N], EpilogueParams&, int) {}

// A lane's rows of a unit, as wgmma leaves them.
template <int N>
void store_tile_rows(float (&sums)[N], const EpilogueParams& output, EpilogueBuffers<1>&, int row, int row_end,
                     int column) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  for (int i = 0; i < N; ++i) {
    const int m = row + lane / 4 + i / 2 % 2 * 8, n = column + i / 4 * 8 + lane % 4 * 2 + i % 2;
    if (m >= row_end || n >= output.n) continue;
    float& c = static_cast<float*>(output.c)[m * output.ldc + n];
    c = output.accumulate ? c + sums[i] : sums[i];
  }
}

}  // namespace mk
