// SPDX-License-Identifier: MIT
// bf16 and fp16 as bits, to fp32 and back with round to nearest even.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "mkernel.h"

namespace mk {

inline float bf16_to_float(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

inline uint16_t float_to_bf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>(bits >> 16 | 0x40);  // a NaN stays one
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

inline float fp16_to_float(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16;
  const uint32_t magnitude = bits & 0x7fff;
  if (magnitude >= 0x7c00) return std::bit_cast<float>(sign | 0x7f800000u | (magnitude & 0x3ff) << 13);
  if (magnitude < 0x400) {  // zero and subnormals: units of 2^-24
    const float value = static_cast<float>(magnitude) * 0x1p-24f;
    return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(value));
  }
  return std::bit_cast<float>(sign | ((magnitude << 13) + 0x38000000u));
}

inline uint16_t float_to_fp16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = bits >> 16 & 0x8000;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00);
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00);  // rounds to 65536 or is larger
  if (magnitude <
      0x38800000u) {  // subnormal result: adding 0.5 leaves the rounded multiple of 2^-24 in the mantissa
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x3f000000u));
  }
  const uint32_t rounded = magnitude + 0xfffu + (magnitude >> 13 & 1);
  return static_cast<uint16_t>(sign | (rounded - 0x38000000u) >> 13);
}

// Element `index` of an array of `dtype`.
inline float load_element(const void* array, mk_dtype_t dtype, int64_t index) {
  switch (dtype) {
    case MK_DTYPE_FP32:
      return static_cast<const float*>(array)[index];
    case MK_DTYPE_FP16:
      return fp16_to_float(static_cast<const uint16_t*>(array)[index]);
    default:
      return bf16_to_float(static_cast<const uint16_t*>(array)[index]);
  }
}

inline void store_element(void* array, mk_dtype_t dtype, int64_t index, float value) {
  switch (dtype) {
    case MK_DTYPE_FP32:
      static_cast<float*>(array)[index] = value;
      break;
    case MK_DTYPE_FP16:
      static_cast<uint16_t*>(array)[index] = float_to_fp16(value);
      break;
    default:
      static_cast<uint16_t*>(array)[index] = float_to_bf16(value);
      break;
  }
}

}  // namespace mk
