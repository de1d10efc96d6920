// SPDX-License-Identifier: MIT
// Elements of the tests' matrices, written for the tests alone: they must not inherit an error of the library.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "mkernel.h"

namespace mk::test {

inline int element_size(mk_dtype_t dtype) { return dtype == MK_DTYPE_FP32 ? 4 : 2; }

// The quiet NaN that outputs and paddings are filled with before a launch.
inline uint32_t poison(mk_dtype_t dtype) {
  return dtype == MK_DTYPE_FP32 ? 0x7fd5a5a5u : dtype == MK_DTYPE_FP16 ? 0x7ea5u : 0x7fd5u;
}

inline uint32_t read_bits(const std::byte* array, mk_dtype_t dtype, int64_t index) {
  uint32_t bits = 0;
  std::memcpy(&bits, array + index * element_size(dtype), static_cast<size_t>(element_size(dtype)));
  return bits;
}

inline void write_bits(std::byte* array, mk_dtype_t dtype, int64_t index, uint32_t bits) {
  std::memcpy(array + index * element_size(dtype), &bits, static_cast<size_t>(element_size(dtype)));
}

struct Format {
  int mantissa;  // stored bits
  int exponent;  // stored bits
};

inline Format format_of(mk_dtype_t dtype) {
  if (dtype == MK_DTYPE_FP32) return {23, 8};
  if (dtype == MK_DTYPE_FP16) return {10, 5};
  return {7, 8};
}

inline double decode(uint32_t bits, mk_dtype_t dtype) {
  const auto [mantissa_bits, exponent_bits] = format_of(dtype);
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const auto mantissa = static_cast<double>(bits & ((1u << mantissa_bits) - 1));
  const int exponent = static_cast<int>(bits >> mantissa_bits & ((1u << exponent_bits) - 1));
  if (exponent == (1 << exponent_bits) - 1) return mantissa == 0 ? HUGE_VAL : std::nan("");
  const double one = exponent == 0 ? 0 : std::ldexp(1.0, mantissa_bits);
  const double magnitude = std::ldexp(mantissa + one, (exponent == 0 ? 1 : exponent) - bias - mantissa_bits);
  return bits >> (mantissa_bits + exponent_bits) & 1 ? -magnitude : magnitude;
}

// Round to nearest even; for values well inside the format's range.
inline uint32_t encode(double value, mk_dtype_t dtype) {
  const auto [mantissa_bits, exponent_bits] = format_of(dtype);
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const uint32_t sign = std::signbit(value) ? 1u << (mantissa_bits + exponent_bits) : 0;
  const double magnitude = std::fabs(value);
  if (magnitude == 0) return sign;
  int exponent = std::ilogb(magnitude);
  if (exponent < 1 - bias) exponent = 1 - bias;
  // Units of the last place; a carry into the next binade, or out of the subnormals, adds up by itself.
  const double units = std::nearbyint(std::ldexp(magnitude, mantissa_bits - exponent));
  const auto whole = static_cast<uint32_t>(units);
  const uint32_t implicit = 1u << mantissa_bits;
  const auto biased = static_cast<uint32_t>(exponent + bias);
  return sign | ((biased << mantissa_bits) + whole - implicit);
}

}  // namespace mk::test
