// SPDX-License-Identifier: MIT
// The epilogue of sums of which each lane has eight neighbouring columns of a row: the bias, C that is added
// to, rounding, and a store of 16 bytes, or 32 of fp32; element by element at the edge and where rows are not
// 16-byte aligned.
#pragma once

#include "kernels/device/partial_sums.cuh"

namespace mk {

constexpr int PIECE_COLUMNS = 8;

template <class T>
__device__ __forceinline__ void add_piece_of(float (&values)[PIECE_COLUMNS], const void* from,
                                             int num_columns) {
#pragma unroll
  for (int i = 0; i < PIECE_COLUMNS; ++i) {
    if (i < num_columns) values[i] += static_cast<float>(static_cast<const T*>(from)[i]);
  }
}

// As many as there are, from `from` on.
__device__ __forceinline__ void add_piece(float (&values)[PIECE_COLUMNS], const void* from, GemmType type,
                                          int num_columns) {
  if (type == GemmType::bf16) {
    add_piece_of<__nv_bfloat16>(values, from, num_columns);
  } else if (type == GemmType::fp16) {
    add_piece_of<__half>(values, from, num_columns);
  } else {
    add_piece_of<float>(values, from, num_columns);
  }
}

template <class T>
__device__ __forceinline__ void store_piece_as(const float (&values)[PIECE_COLUMNS], T* to, int num_columns,
                                               bool is_aligned) {
  if (is_aligned && num_columns >= PIECE_COLUMNS) {
#pragma unroll
    for (int i = 0; i < PIECE_COLUMNS; i += PartialChunk<T>::NUM)
      *reinterpret_cast<uint4*>(to + i) = PartialChunk<T>::pack(values + i);
    return;
  }
#pragma unroll
  for (int i = 0; i < PIECE_COLUMNS; ++i) {
    if (i < num_columns) to[i] = static_cast<T>(values[i]);
  }
}

// The piece of a row from `column` on, rounded to the output's type.
__device__ __forceinline__ void store_piece(const float (&values)[PIECE_COLUMNS], const EpilogueParams& output,
                                            int64_t row, int column) {
  std::byte* const to =
      static_cast<std::byte*>(output.c) + (row * output.ldc + column) * element_bytes_of(output.out_type);
  const int num_columns = output.n - column;
  if (output.out_type == GemmType::bf16) {
    store_piece_as(values, reinterpret_cast<__nv_bfloat16*>(to), num_columns, output.rows_aligned);
  } else if (output.out_type == GemmType::fp16) {
    store_piece_as(values, reinterpret_cast<__half*>(to), num_columns, output.rows_aligned);
  } else {
    store_piece_as(values, reinterpret_cast<float*>(to), num_columns, output.rows_aligned);
  }
}

__device__ __forceinline__ void add_piece_of_bias(float (&values)[PIECE_COLUMNS], const EpilogueParams& output,
                                                  int column) {
  if (output.bias == nullptr) return;
  const auto* bias =
      static_cast<const std::byte*>(output.bias) + int64_t{column} * element_bytes_of(output.bias_type);
  add_piece(values, bias, output.bias_type, output.n - column);
}

// C is added to, if the output says so.
__device__ __forceinline__ void add_piece_of_c(float (&values)[PIECE_COLUMNS], const EpilogueParams& output,
                                               int64_t row, int column) {
  if (!output.accumulate) return;
  const auto* c =
      static_cast<const std::byte*>(output.c) + (row * output.ldc + column) * element_bytes_of(output.out_type);
  add_piece(values, c, output.out_type, output.n - column);
}

__device__ __forceinline__ void round_piece(float (&values)[PIECE_COLUMNS], GemmType type) {
#pragma unroll
  for (float& value : values) {
    if (type == GemmType::bf16) value = __bfloat162float(__float2bfloat16(value));
    if (type == GemmType::fp16) value = __half2float(__float2half(value));
  }
}

}  // namespace mk
