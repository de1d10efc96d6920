// SPDX-License-Identifier: MIT
// A caller's tensors of ring attention as kernels address them.
#pragma once

#include <algorithm>

#include "kernels/cuda/gemm_type.h"
#include "kernels/gemm/tensor_map.h"
#include "kernels/ring_attention_call.h"

namespace mk {

// Bytes from one row, head and batch to the next.
struct AttentionStrides {
  int64_t row, head, batch;
};
inline AttentionStrides attention_strides(const RingAttentionCall& call, int heads, int64_t rows) {
  const int64_t dim_bytes = int64_t{call.dim} * 2;
  if (call.layout == MK_ATTENTION_BHSD) return {dim_bytes, rows * dim_bytes, heads * rows * dim_bytes};
  return {heads * dim_bytes, dim_bytes, rows * heads * dim_bytes};
}

// `any`: a valid address for a tensor without elements.
inline bool encode_attention_map(CUtensorMap* map, const RingAttentionCall& call, const void* data,
                                 const void* any, int heads, int64_t rows, int box_rows) {
  const AttentionStrides strides = attention_strides(call, heads, std::max<int64_t>(1, rows));
  return encode_tensor_map_4d(map, gemm_type(call.dtype), rows > 0 && call.batch > 0 ? data : any,
                              {call.dim, rows, heads, call.batch}, {strides.row, strides.head, strides.batch},
                              box_rows, 64);
}

}  // namespace mk
