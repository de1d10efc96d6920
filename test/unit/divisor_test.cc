// SPDX-License-Identifier: MIT
// Quotients by multiplication are those of a division.
#include "kernels/device/divisor.h"

#include <climits>
#include <random>
#include <vector>

#include "test/support/catch.h"

namespace {

// Both sides of every multiple that can be told from it, and the ends.
void check_divisor(int value, std::minstd_rand& random) {
  const mk::Divisor divisor(value);
  std::vector<int64_t> numbers = {0, 1, value - 1, value, int64_t{value} + 1, INT_MAX - 1, INT_MAX};
  std::uniform_int_distribution<int> any(0, INT_MAX);
  for (int i = 0; i < 200; ++i) numbers.push_back(any(random));
  const size_t count = numbers.size();
  for (size_t i = 0; i < count; ++i) {
    const int64_t multiple = numbers[i] / value * value;
    numbers.insert(numbers.end(), {multiple - 1, multiple, multiple + value - 1});
  }
  for (const int64_t number : numbers) {
    if (number < 0 || number > INT_MAX) continue;
    if (static_cast<int>(number) / divisor != number / value) FAIL(number << " / " << value);
  }
}

}  // namespace

TEST_CASE("quotients by multiplication are exact") {
  std::minstd_rand random(7);
  for (int value = 1; value <= 4096; ++value) check_divisor(value, random);
  for (int bit = 1; bit < 31; ++bit) {
    const int power = 1 << bit;
    for (const int value : {power - 1, power, power + 1}) check_divisor(value, random);
  }
  check_divisor(INT_MAX - 1, random);
  check_divisor(INT_MAX, random);
  std::uniform_int_distribution<int> any(1, INT_MAX);
  for (int i = 0; i < 2000; ++i) check_divisor(any(random), random);
}

TEST_CASE("of nothing to divide by, one") {
  CHECK(5 / mk::Divisor() == 5);
  CHECK(5 / mk::Divisor(0) == 5);
}
