// SPDX-License-Identifier: MIT
// Inputs as pure functions of their indices, so that any rank can work out any other's.
#pragma once

#include <cstdint>

#include "mkernel.h"

namespace perf {

enum class Pattern {
  kIntegers,  // every partial sum is an integer that every dtype on its way represents: results are exact
  kRandom     // uniform in [-0.5, 0.5), rounded to the dtype
};

struct InputMatrix {
  Pattern pattern = Pattern::kRandom;
  mk_dtype_t dtype = MK_DTYPE_BF16;
  uint64_t seed = 0;
  // kIntegers: of each run of this many elements of a row one, at a place that depends on row and run, is not
  // zero.
  int64_t run_length = 1;

  float value(int64_t row, int64_t col) const;
};

// The run length of A in C = A * B over `inner` products for which |every partial sum| <= limit: elements are
// -2, -1, 1 or 2, so that of each row at most limit / 4 may differ from zero.
int64_t exact_run_length(int64_t inner, int64_t limit);

// A pseudo-random number of (seed, row, col).
uint64_t index_hash(uint64_t seed, uint64_t row, uint64_t col);

}  // namespace perf
