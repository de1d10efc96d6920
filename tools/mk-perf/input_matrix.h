// SPDX-License-Identifier: MIT
// Inputs as pure functions of their indices, so that any rank can work out any other's.
#pragma once

#include <cstdint>

#include "kernels/device/host_device.h"
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
  // The same before it is rounded to the dtype; what fills matrices on a GPU rounds as it stores.
  MK_HOST_DEVICE float unrounded_value(int64_t row, int64_t col) const;
};

// The run length of A in C = A * B over `inner` products for which |every partial sum| <= limit: elements are
// -2, -1, 1 or 2, so that of each row at most limit / 4 may differ from zero.
int64_t exact_run_length(int64_t inner, int64_t limit);

// The finaliser of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014).
MK_HOST_DEVICE uint64_t mix(uint64_t word) {
  word = (word ^ word >> 30) * 0xbf58476d1ce4e5b9;
  word = (word ^ word >> 27) * 0x94d049bb133111eb;
  return word ^ word >> 31;
}

// A pseudo-random number of (seed, row, col).
MK_HOST_DEVICE uint64_t index_hash(uint64_t seed, uint64_t row, uint64_t col) {
  constexpr uint64_t kGolden = 0x9e3779b97f4a7c15;
  return mix(mix(seed + (row + 1) * kGolden) + (col + 1) * kGolden);
}

MK_HOST_DEVICE float InputMatrix::unrounded_value(int64_t row, int64_t col) const {
  const uint64_t hash = index_hash(seed, static_cast<uint64_t>(row), static_cast<uint64_t>(col));
  if (pattern == Pattern::kRandom) return static_cast<float>(hash >> 40) * 0x1p-24f - 0.5f;
  const uint64_t run = static_cast<uint64_t>(col / run_length);
  const uint64_t place =
      index_hash(seed ^ 0x5bd1e995, static_cast<uint64_t>(row), run) % static_cast<uint64_t>(run_length);
  if (static_cast<uint64_t>(col % run_length) != place) return 0.0f;
  const float magnitude = hash >> 32 & 1 ? 2.0f : 1.0f;
  return hash >> 33 & 1 ? -magnitude : magnitude;
}

}  // namespace perf
