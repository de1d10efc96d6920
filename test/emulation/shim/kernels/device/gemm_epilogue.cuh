// SPDX-License-Identifier: MIT
// How a kernel rounds on its way out, on the host.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/device/gemm_epilogue_params.h"
#include "shim/device_words.h"

namespace mk {

template <class Pair>
uint32_t bits_of(const Pair& pair) {
  uint32_t bits = 0;
  static_assert(sizeof bits == sizeof pair);
  std::memcpy(&bits, &pair, sizeof bits);
  return bits;
}
template <class Out>
uint32_t pack_pair(float low, float high);
template <>
inline uint32_t pack_pair<__nv_bfloat16>(float low, float high) {
  return bits_of(__floats2bfloat162_rn(low, high));
}
template <>
inline uint32_t pack_pair<__half>(float low, float high) {
  return bits_of(__floats2half2_rn(low, high));
}

}  // namespace mk
