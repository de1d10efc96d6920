// SPDX-License-Identifier: MIT
// What consumers of attention keep of a softmax, and elements as they are stored.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>
#include <type_traits>

namespace mk {

// Two 16-bit elements.
template <class Element>
__device__ __forceinline__ uint32_t pack_pair(float low, float high) {
  if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
    const __nv_bfloat162 packed = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const uint32_t&>(packed);
  } else {
    const __half2 packed = __floats2half2_rn(low, high);
    return reinterpret_cast<const uint32_t&>(packed);
  }
}

// A thread's two rows of its warpgroup's 64: lane / 4 and 8 further on, of the warp's 16.
struct SoftmaxRows {
  // What weights are relative to, of the logits before scaling: the row's maximum, or somewhat less.
  float maximum[2];
  float sum[2];  // of this thread's part of the weights
};

// Of a row's logits. -inf where it sees nothing, or logits of -inf only. scale_log2: of the logits, times
// log2(e).
__device__ __forceinline__ float row_lse(float maximum, float sum, float scale_log2) {
  constexpr float LN2 = 0.693147180559945309f;
  return maximum == -INFINITY ? -INFINITY : maximum * (scale_log2 * LN2) + logf(sum);
}

}  // namespace mk
