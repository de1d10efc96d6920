// SPDX-License-Identifier: MIT
// Operands of integers that every type holds, and kernels that fill with them and compare.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "operators_job.h"

namespace operators {

// -1, 0 or 1, mostly 0, the same for everyone who asks for the same element.
__device__ float element(uint32_t seed, int64_t row, int64_t column) {
  uint64_t x = (static_cast<uint64_t>(row) << 32) ^ static_cast<uint64_t>(column) ^ (uint64_t{seed} << 20);
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ x >> 27) * 0x94d049bb133111ebull;
  const uint32_t bits = static_cast<uint32_t>(x >> 40);
  return bits % 8 == 0 ? 1.0f : bits % 8 == 1 ? -1.0f : 0.0f;
}

template <class T>
__device__ T rounded(float value) {
  return static_cast<T>(value);
}

// What lies between `columns` and `ld` is poisoned.
template <class T>
__global__ void fill(T* to, int64_t rows, int64_t columns, int64_t ld, uint32_t seed, int64_t first_row,
                     int64_t first_column) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < rows * ld;
       i += gridDim.x * int64_t{blockDim.x}) {
    const int64_t row = i / ld, column = i % ld;
    to[i] = column < columns ? rounded<T>(element(seed, first_row + row, first_column + column))
                             : rounded<T>(__int_as_float(0x7fc00000));
  }
}

// B as [n, k]: the same elements, element(k, column).
template <class T>
__global__ void fill_transposed(T* to, int64_t n, int64_t k, int64_t ld, uint32_t seed, int64_t first_k,
                                int64_t first_column) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < n * ld;
       i += gridDim.x * int64_t{blockDim.x}) {
    const int64_t row = i / ld, column = i % ld;
    to[i] = column < k ? rounded<T>(element(seed, first_k + column, first_column + row))
                       : rounded<T>(__int_as_float(0x7fc00000));
  }
}

template <class T>
__global__ void poison(T* to, int64_t count) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count;
       i += gridDim.x * int64_t{blockDim.x})
    to[i] = rounded<T>(__int_as_float(0x7fc00000));
}

constexpr uint32_t SEED_A = 1, SEED_B = 2, SEED_BIAS = 3, SEED_C = 4;

template <class T>
__global__ void compare_gathered(const T* gathered, int64_t ld, int64_t rows, int64_t k, uint32_t seed,
                                 unsigned long long* wrong) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < rows * ld;
       i += gridDim.x * int64_t{blockDim.x}) {
    const int64_t row = i / ld, column = i % ld;
    const float seen = static_cast<float>(gathered[i]);
    if (!(column >= k ? isnan(seen) : seen == element(seed, row, column))) atomicAdd(wrong, 1ull);
  }
}

inline int64_t round_up(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

template <class F>
void with_type(mk_dtype_t type, F&& f) {
  if (type == MK_DTYPE_BF16) f(__nv_bfloat16{});
  if (type == MK_DTYPE_FP16) f(__half{});
  if (type == MK_DTYPE_FP32) f(float{});
}

}  // namespace operators
