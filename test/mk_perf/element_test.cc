// SPDX-License-Identifier: MIT
#include <cmath>

#include "element.h"
#include "input_matrix.h"
#include "test/support/catch.h"

using namespace perf;

TEST_CASE("bf16 rounds to nearest, ties to even") {
  CHECK(bf16_bits(1.0f) == 0x3f80);
  CHECK(bf16_bits(-2.0f) == 0xc000);
  CHECK(bf16_bits(1.0f + 0x1p-8f) == 0x3f80);             // a tie, down to even
  CHECK(bf16_bits(1.0f + 3 * 0x1p-8f) == 0x3f82);         // a tie, up to even
  CHECK(bf16_bits(1.0f + 0x1p-8f + 0x1p-20f) == 0x3f81);  // just above the tie
  CHECK(bf16_bits(3.4e38f) == 0x7f80);                    // overflows to infinity
  CHECK(std::isnan(bf16_value(bf16_bits(NAN))));
}

TEST_CASE("fp16 agrees with its definition at the edges") {
  CHECK(fp16_bits(1.0f) == 0x3c00);
  CHECK(fp16_bits(-0.0f) == 0x8000);
  CHECK(fp16_bits(65504.0f) == 0x7bff);
  CHECK(fp16_bits(65519.0f) == 0x7bff);
  CHECK(fp16_bits(65520.0f) == 0x7c00);
  CHECK(fp16_bits(0x1p-24f) == 0x0001);
  CHECK(fp16_bits(0x1p-25f) == 0x0000);                   // a tie, down to even
  CHECK(fp16_bits(0x1.8p-24f) == 0x0002);                 // a tie, up to even
  CHECK(fp16_bits(0x1.ff8p-15f) == 0x03ff);               // the largest subnormal
  CHECK(fp16_bits(0x1.ffcp-15f) == 0x0400);               // a tie, up to even, into the normal numbers
  CHECK(fp16_bits(0x1.fffp-15f) == 0x0400);               // rounds into the normal numbers
  CHECK(fp16_bits(2047.0f / 1024 + 0x1p-11f) == 0x4000);  // rounds into the next exponent
}

TEST_CASE("every fp16 and bf16 number survives a round trip") {
  for (uint32_t bits = 0; bits <= 0xffff; ++bits) {
    const auto half = static_cast<uint16_t>(bits);
    if (!std::isnan(fp16_value(half)) && fp16_bits(fp16_value(half)) != half) FAIL("fp16 " << bits);
    if (!std::isnan(bf16_value(half)) && bf16_bits(bf16_value(half)) != half) FAIL("bf16 " << bits);
  }
}

TEST_CASE("poison is a NaN and recognised") {
  for (const mk_dtype_t dtype : {MK_DTYPE_BF16, MK_DTYPE_FP16, MK_DTYPE_FP32}) {
    uint32_t memory[4] = {};
    poison_elements(dtype, memory, 3);
    for (int64_t index = 0; index < 3; ++index) {
      CHECK(std::isnan(load_element(dtype, memory, index)));
      CHECK(is_poison(dtype, memory, index));
    }
    CHECK(!is_poison(dtype, memory, 3));
  }
}

TEST_CASE("integer inputs keep every partial sum exact") {
  for (const int64_t limit : {exact_integer_limit(MK_DTYPE_BF16), exact_integer_limit(MK_DTYPE_FP16)}) {
    for (const int64_t inner : {1, 63, 64, 65, 1000, 8192}) {
      const InputMatrix a{Pattern::kIntegers, MK_DTYPE_BF16, 7, exact_run_length(inner, limit)};
      for (int64_t row = 0; row < 16; ++row) {
        int64_t largest_sum = 0;
        for (int64_t k = 0; k < inner; ++k)
          largest_sum += 2 * std::llabs(static_cast<int64_t>(a.value(row, k)));
        CHECK(largest_sum <= limit);
        CHECK(largest_sum > 0);
      }
    }
  }
}

TEST_CASE("random inputs are representable, centred and differ from set to set") {
  const InputMatrix a{Pattern::kRandom, MK_DTYPE_FP16, 1, 1};
  const InputMatrix other{Pattern::kRandom, MK_DTYPE_FP16, 2, 1};
  double sum = 0;
  int equal = 0;
  for (int64_t row = 0; row < 100; ++row) {
    for (int64_t col = 0; col < 100; ++col) {
      const float value = a.value(row, col);
      CHECK(round_to(MK_DTYPE_FP16, value) == value);
      CHECK(std::fabs(value) <= 0.5f);
      sum += value;
      equal += value == other.value(row, col);
    }
  }
  CHECK(std::fabs(sum / 10000) < 0.02);
  CHECK(equal < 100);
}
