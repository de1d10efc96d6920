// SPDX-License-Identifier: MIT
#include "input_matrix.h"

#include <algorithm>

#include "element.h"

namespace perf {
float InputMatrix::value(int64_t row, int64_t col) const {
  // Integers are small enough for every dtype.
  return round_to(dtype, unrounded_value(row, col));
}

int64_t exact_run_length(int64_t inner, int64_t limit) {
  const int64_t non_zero = std::max<int64_t>(1, limit / 4);
  return std::max<int64_t>(1, (inner + non_zero - 1) / non_zero);
}

}  // namespace perf
