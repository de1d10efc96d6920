// SPDX-License-Identifier: MIT
#include "input_matrix.h"

#include <algorithm>

#include "element.h"

namespace perf {
namespace {

// The finaliser of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014).
uint64_t mix(uint64_t word) {
  word = (word ^ word >> 30) * 0xbf58476d1ce4e5b9;
  word = (word ^ word >> 27) * 0x94d049bb133111eb;
  return word ^ word >> 31;
}

constexpr uint64_t kGolden = 0x9e3779b97f4a7c15;

}  // namespace

uint64_t index_hash(uint64_t seed, uint64_t row, uint64_t col) {
  return mix(mix(seed + (row + 1) * kGolden) + (col + 1) * kGolden);
}

float InputMatrix::value(int64_t row, int64_t col) const {
  const uint64_t hash = index_hash(seed, static_cast<uint64_t>(row), static_cast<uint64_t>(col));
  if (pattern == Pattern::kRandom) {
    return round_to(dtype, static_cast<float>(hash >> 40) * 0x1p-24f - 0.5f);
  }
  const uint64_t run = static_cast<uint64_t>(col / run_length);
  const uint64_t place =
      index_hash(seed ^ 0x5bd1e995, static_cast<uint64_t>(row), run) % static_cast<uint64_t>(run_length);
  if (static_cast<uint64_t>(col % run_length) != place) return 0.0f;
  const float magnitude = hash >> 32 & 1 ? 2.0f : 1.0f;
  return hash >> 33 & 1 ? -magnitude : magnitude;
}

int64_t exact_run_length(int64_t inner, int64_t limit) {
  const int64_t non_zero = std::max<int64_t>(1, limit / 4);
  return std::max<int64_t>(1, (inner + non_zero - 1) / non_zero);
}

}  // namespace perf
