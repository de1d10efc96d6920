// SPDX-License-Identifier: MIT
#include "element.h"

#include <bit>
#include <cmath>
#include <cstring>

#include "errors.h"

namespace perf {
namespace {

constexpr uint16_t kPoisonBf16 = 0x7fd5;
constexpr uint16_t kPoisonFp16 = 0x7ed5;
constexpr uint32_t kPoisonFp32 = 0x7fd5d5d5;

uint16_t poison16(mk_dtype_t dtype) { return dtype == MK_DTYPE_FP16 ? kPoisonFp16 : kPoisonBf16; }

}  // namespace

size_t element_bytes(mk_dtype_t dtype) { return dtype == MK_DTYPE_FP32 ? 4 : 2; }

const char* dtype_name(mk_dtype_t dtype) {
  switch (dtype) {
    case MK_DTYPE_BF16:
      return "bf16";
    case MK_DTYPE_FP16:
      return "fp16";
    case MK_DTYPE_FP32:
      return "fp32";
    default:
      return "?";
  }
}

mk_dtype_t parse_dtype(const std::string& text, const char* option, bool allow_fp32) {
  if (text == "bf16") return MK_DTYPE_BF16;
  if (text == "fp16") return MK_DTYPE_FP16;
  if (text == "fp32" && allow_fp32) return MK_DTYPE_FP32;
  throw UsageError(std::string(option) + ": expected " + (allow_fp32 ? "bf16, fp16 or fp32" : "bf16 or fp16") +
                   ", saw \"" + text + "\"");
}

uint16_t bf16_bits(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if (std::isnan(value)) return static_cast<uint16_t>(bits >> 16 | 0x40);
  const uint32_t ties_to_even = 0x7fff + (bits >> 16 & 1);
  return static_cast<uint16_t>((bits + ties_to_even) >> 16);
}

float bf16_value(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

uint16_t fp16_bits(float value) {
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const double magnitude = std::fabs(static_cast<double>(value));
  if (std::isnan(value)) return static_cast<uint16_t>(sign | 0x7e00);
  if (magnitude >= 65520.0) return static_cast<uint16_t>(sign | 0x7c00);
  // nearbyint rounds ties to even; a mantissa that overflows carries into the exponent by the addition.
  if (magnitude < 0x1p-14)
    return static_cast<uint16_t>(sign + static_cast<uint16_t>(std::nearbyint(magnitude * 0x1p24)));
  const int exponent = std::ilogb(magnitude);
  const auto mantissa = static_cast<uint16_t>(std::nearbyint(std::ldexp(magnitude, 10 - exponent)));
  return static_cast<uint16_t>(sign + ((exponent + 14) << 10) + mantissa);
}

float fp16_value(uint16_t bits) {
  const int exponent = bits >> 10 & 0x1f;
  const int mantissa = bits & 0x3ff;
  float magnitude;
  if (exponent == 0x1f) {
    magnitude = mantissa ? NAN : INFINITY;
  } else if (exponent == 0) {
    magnitude = std::ldexp(static_cast<float>(mantissa), -24);
  } else {
    magnitude = std::ldexp(static_cast<float>(1024 + mantissa), exponent - 25);
  }
  return bits & 0x8000 ? -magnitude : magnitude;
}

float load_element(mk_dtype_t dtype, const void* matrix, int64_t index) {
  if (dtype == MK_DTYPE_FP32) return static_cast<const float*>(matrix)[index];
  const uint16_t bits = static_cast<const uint16_t*>(matrix)[index];
  return dtype == MK_DTYPE_FP16 ? fp16_value(bits) : bf16_value(bits);
}

void store_element(mk_dtype_t dtype, void* matrix, int64_t index, float value) {
  if (dtype == MK_DTYPE_FP32) {
    static_cast<float*>(matrix)[index] = value;
  } else {
    static_cast<uint16_t*>(matrix)[index] = dtype == MK_DTYPE_FP16 ? fp16_bits(value) : bf16_bits(value);
  }
}

float round_to(mk_dtype_t dtype, float value) {
  switch (dtype) {
    case MK_DTYPE_BF16:
      return bf16_value(bf16_bits(value));
    case MK_DTYPE_FP16:
      return fp16_value(fp16_bits(value));
    default:
      return value;
  }
}

void poison_elements(mk_dtype_t dtype, void* matrix, int64_t count) {
  if (dtype == MK_DTYPE_FP32) {
    auto* elements = static_cast<uint32_t*>(matrix);
    for (int64_t index = 0; index < count; ++index) elements[index] = kPoisonFp32;
  } else {
    auto* elements = static_cast<uint16_t*>(matrix);
    for (int64_t index = 0; index < count; ++index) elements[index] = poison16(dtype);
  }
}

bool is_poison(mk_dtype_t dtype, const void* matrix, int64_t index) {
  if (dtype == MK_DTYPE_FP32) return static_cast<const uint32_t*>(matrix)[index] == kPoisonFp32;
  return static_cast<const uint16_t*>(matrix)[index] == poison16(dtype);
}

int64_t exact_integer_limit(mk_dtype_t dtype) {
  switch (dtype) {
    case MK_DTYPE_BF16:
      return int64_t{1} << 8;
    case MK_DTYPE_FP16:
      return int64_t{1} << 11;
    default:
      return int64_t{1} << 24;
  }
}

double relative_error_limit(mk_dtype_t dtype) {
  switch (dtype) {
    case MK_DTYPE_BF16:
      return 5e-3;
    case MK_DTYPE_FP16:
      return 1e-3;
    default:
      return 1e-4;
  }
}

}  // namespace perf
