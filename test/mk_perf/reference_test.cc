// SPDX-License-Identifier: MIT
// The checker itself: it must accept a right output and notice each way in which one can be wrong.
#include <cmath>
#include <cstring>

#include "element.h"
#include "reference.h"
#include "test/support/catch.h"

using namespace perf;

namespace {

constexpr int64_t kInner = 37;
const Window kWindow = {3, 5, 12, 9};
constexpr int64_t kLd = 16;

struct Case {
  InputMatrix a;
  InputMatrix b;
  Sample sample;
  std::vector<double> reference;
  std::vector<unsigned char> memory;
  mk_dtype_t dtype;

  Case(Pattern pattern, mk_dtype_t type) : dtype(type) {
    a = {pattern, MK_DTYPE_BF16, 1, exact_run_length(kInner, exact_integer_limit(type))};
    b = {pattern, MK_DTYPE_BF16, 2, 1};
    sample = choose_sample(kWindow, kInner, 1 << 20, 1);
    reference = reference_product(a, b, kInner, kWindow, sample);
    memory.resize(static_cast<size_t>(kWindow.rows * kLd) * element_bytes(type));
    poison_elements(type, memory.data(), kWindow.rows * kLd);
    for (int64_t row = 0; row < kWindow.rows; ++row) {
      for (int64_t col = 0; col < kWindow.cols; ++col) {
        double sum = 0;
        for (int64_t k = 0; k < kInner; ++k) sum += double{a.value(3 + row, k)} * double{b.value(k, 5 + col)};
        store_element(type, memory.data(), row * kLd + col, static_cast<float>(sum));
      }
    }
  }

  Comparison comparison(bool must_be_exact) const {
    return compare({memory.data(), dtype, kWindow.rows, kWindow.cols, kLd}, sample, reference, must_be_exact);
  }
};

}  // namespace

TEST_CASE("a right output passes, exactly on integers") {
  for (const mk_dtype_t dtype : {MK_DTYPE_BF16, MK_DTYPE_FP16, MK_DTYPE_FP32}) {
    const Comparison integers = Case(Pattern::kIntegers, dtype).comparison(true);
    CHECK(integers.exact);
    CHECK(integers.complete);
    CHECK(integers.problem == "");
    CHECK(integers.relative_error() == 0);
    const Comparison random = Case(Pattern::kRandom, dtype).comparison(false);
    CHECK(random.complete);
    CHECK(random.relative_error() <= relative_error_limit(dtype));
    if (dtype != MK_DTYPE_FP32) CHECK(random.relative_error() > 0);
  }
}

TEST_CASE("one bit of one element is noticed") {
  Case wrong(Pattern::kIntegers, MK_DTYPE_BF16);
  wrong.memory[2 * (4 * kLd + 7)] ^= 1;
  const Comparison comparison = wrong.comparison(true);
  CHECK(!comparison.exact);
  CHECK(comparison.complete);
  CHECK(comparison.problem.find("row 4, column 7: expected") == 0);
}

TEST_CASE("a lost contribution is noticed on integers and on random inputs") {
  for (const Pattern pattern : {Pattern::kIntegers, Pattern::kRandom}) {
    Case wrong(pattern, MK_DTYPE_FP32);
    for (int64_t row = 0; row < kWindow.rows; ++row) {
      for (int64_t col = 0; col < kWindow.cols; ++col) {
        double lost = 0;
        for (int64_t k = 8; k < 16; ++k)
          lost += double{wrong.a.value(3 + row, k)} * double{wrong.b.value(k, 5 + col)};
        const float whole = load_element(MK_DTYPE_FP32, wrong.memory.data(), row * kLd + col);
        store_element(MK_DTYPE_FP32, wrong.memory.data(), row * kLd + col, whole - static_cast<float>(lost));
      }
    }
    const Comparison comparison = wrong.comparison(pattern == Pattern::kIntegers);
    CHECK(!comparison.exact);
    CHECK(comparison.relative_error() > relative_error_limit(MK_DTYPE_FP32));
  }
}

TEST_CASE("an element that was not written, a NaN and an infinity are noticed") {
  for (const mk_dtype_t dtype : {MK_DTYPE_BF16, MK_DTYPE_FP16, MK_DTYPE_FP32}) {
    Case untouched(Pattern::kRandom, dtype);
    poison_elements(dtype,
                    untouched.memory.data() + (11 * kLd + 8) * static_cast<int64_t>(element_bytes(dtype)), 1);
    CHECK(!untouched.comparison(false).complete);
    CHECK(untouched.comparison(false).problem == "row 11, column 8: never written");
    CHECK(std::isinf(untouched.comparison(false).relative_error()));

    Case infinite(Pattern::kRandom, dtype);
    store_element(dtype, infinite.memory.data(), 5, INFINITY);
    CHECK(!infinite.comparison(false).complete);
    CHECK(infinite.comparison(false).problem.find("row 0, column 5: expected a finite number") == 0);
  }
}

TEST_CASE("a write beyond the end of a row is noticed, one past the last row's end too where memory has it") {
  Case wrong(Pattern::kIntegers, MK_DTYPE_BF16);
  store_element(MK_DTYPE_BF16, wrong.memory.data(), 6 * kLd + 9, 0.0f);
  CHECK(!wrong.comparison(true).complete);
  CHECK(wrong.comparison(true).problem.find("row 6: written beyond its last element, at column 9 of 9") == 0);
}

TEST_CASE("zero equals minus zero") {
  Case zero(Pattern::kIntegers, MK_DTYPE_BF16);
  std::fill(zero.reference.begin(), zero.reference.end(), 0.0);
  for (int64_t row = 0; row < kWindow.rows; ++row) {
    for (int64_t col = 0; col < kWindow.cols; ++col)
      store_element(zero.dtype, zero.memory.data(), row * kLd + col, -0.0f);
  }
  CHECK(zero.comparison(true).exact);
  CHECK(zero.comparison(true).relative_error() == 0);
}

TEST_CASE("the error of few elements counts less, and where the reference is zero it counts by itself") {
  Comparison comparison;
  comparison.squared_reference = 100;
  comparison.squared_error = 1;
  comparison.num_elements = 64;
  const auto is_near = [&](double expected) {
    return std::abs(comparison.relative_error() - expected) <= 0.002 * expected;
  };
  CHECK(is_near(0.05));
  comparison.num_elements = 64000;
  CHECK(is_near(0.1));
  comparison.squared_reference = 0;
  CHECK(is_near(std::sqrt(1 / 64000.0)));
  Comparison other = comparison;
  other.merge(comparison);
  CHECK(other.num_elements == 128000);
  CHECK(Comparison().relative_error() == 0);
}

TEST_CASE("a sample stays within its budget, reaches the corners and finds what is wrong everywhere") {
  const Window large = {0, 0, 4096, 2048};
  const Sample sample = choose_sample(large, 4096, int64_t{1} << 24, 1);
  CHECK(!sample.whole);
  CHECK(sample.rows.front() == 0);
  CHECK(sample.rows.back() == 4095);
  CHECK(sample.cols.front() == 0);
  CHECK(sample.cols.back() == 2047);
  CHECK(sample.rows.size() * sample.cols.size() * 4096 <= size_t{1} << 25);
  CHECK(sample.rows.size() >= 32);

  const Sample few_rows = choose_sample({0, 0, 4, 8192}, 8192, int64_t{1} << 24, 1);
  CHECK(few_rows.rows.size() == 4);
  CHECK(few_rows.cols.size() >= 400);
  CHECK(choose_sample({0, 0, 0, 128}, 128, 1 << 20, 1).whole);
  CHECK(choose_sample({0, 0, 0, 128}, 128, 1 << 20, 1).rows.empty());
}

TEST_CASE("an empty window of a rank without rows compares as right") {
  const Window empty = {7, 0, 0, 16};
  const Sample sample = choose_sample(empty, 8, 1 << 20, 1);
  const InputMatrix input;
  const Comparison comparison = compare({nullptr, MK_DTYPE_BF16, 0, 16, 16}, sample,
                                        reference_product(input, input, 8, empty, sample), true);
  CHECK(comparison.exact);
  CHECK(comparison.complete);
  CHECK(comparison.relative_error() == 0);
}
