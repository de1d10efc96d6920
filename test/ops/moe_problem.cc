// SPDX-License-Identifier: MIT
#include "moe_problem.h"

#include <algorithm>
#include <numeric>
#include <random>
#include <sstream>

#include "element.h"

namespace mk::test {
namespace {

// The finaliser of SplitMix64.
uint64_t mix(uint64_t word) {
  word = (word ^ word >> 30) * 0xbf58476d1ce4e5b9ull;
  word = (word ^ word >> 27) * 0x94d049bb133111ebull;
  return word ^ word >> 31;
}

enum Kind { kX = 1, kWIn, kWOut, kRow, kScale, kWeight };

}  // namespace

int64_t MoeCase::tokens_of(int rank) const {
  if (same_tokens) return tokens;
  // 0, a few, many, in turns that depend on the seed.
  const int64_t turn = (rank + static_cast<int64_t>(seed)) % 4;
  return tokens * turn / 2 + (turn == 3 ? 1 : 0);
}

double MoeCase::tolerance() const {
  return out_dtype == MK_DTYPE_BF16 ? 5e-3 : out_dtype == MK_DTYPE_FP16 ? 1e-3 : 1e-4;
}

std::string describe(const MoeCase& moe) {
  static constexpr const char* kSpreads[] = {"even", "one_expert", "few", "half", "nowhere"};
  std::ostringstream text;
  text << "moe tokens=" << moe.tokens << (moe.same_tokens ? " each" : " uneven") << " hidden=" << moe.hidden
       << " inter=" << moe.inter << " experts=" << moe.experts << " topk=" << moe.topk << " "
       << kSpreads[static_cast<int>(moe.spread)] << " dtype=" << moe.dtype << " out=" << moe.out_dtype
       << (moe.w_layout == MK_LAYOUT_NK ? " NK" : " KN") << " index=" << moe.index_type
       << (moe.row_scale ? " scale" : "") << (moe.dispatched_rows ? " rows" : "") << " spare=" << moe.spare_rows
       << " padding=" << moe.padding << " tile=" << moe.tuning.tile_m << "x" << moe.tuning.tile_n
       << " chunk=" << moe.tuning.chunk_bytes << " compute=" << moe.tuning.compute_ctas << " seed=" << moe.seed;
  return text.str();
}

MoeProblem::MoeProblem(const MoeCase& moe_in, int nranks_in)
    : moe(moe_in), nranks(nranks_in), rows_(static_cast<size_t>(moe_in.experts)) {
  std::mt19937_64 random(moe.seed * 7919 + 3);
  for (int rank = 0; rank < nranks; ++rank) {
    std::vector<int64_t>& own = experts_.emplace_back();
    for (int64_t token = 0; token < moe.tokens_of(rank); ++token) {
      std::vector<int64_t> all(static_cast<size_t>(std::max(moe.experts, moe.topk)), -1);
      std::iota(all.begin(), all.begin() + moe.experts, 0);
      std::shuffle(all.begin(), all.begin() + moe.experts, random);
      for (int k = 0; k < moe.topk; ++k) {
        int64_t expert = all[static_cast<size_t>(k)];
        if (moe.spread == Spread::one_expert)
          expert = k == static_cast<int>(token) % moe.topk ? moe.experts - 1 : -1;
        if (moe.spread == Spread::few) expert = k < 2 && k < moe.experts ? (k + token) % 2 % moe.experts : -1;
        if (moe.spread == Spread::half && (token + k) % 2 == 0) expert = -1;
        if (moe.spread == Spread::nowhere) expert = -1;
        own.push_back(expert);
        if (expert >= 0) rows_[static_cast<size_t>(expert)].push_back({rank, token, k});
      }
    }
  }
}

int MoeProblem::first_expert(int rank) const {
  return std::min(moe.experts, (moe.experts + nranks - 1) / nranks * rank);
}
int MoeProblem::num_experts(int rank) const { return first_expert(rank + 1) - first_expert(rank); }

int64_t MoeProblem::rows_of_rank(int rank) const {
  int64_t rows = 0;
  for (int expert = first_expert(rank); expert < first_expert(rank + 1); ++expert)
    rows += static_cast<int64_t>(rows_[static_cast<size_t>(expert)].size());
  return rows;
}

int64_t MoeProblem::capacity() const {
  int64_t most = 0;
  for (int rank = 0; rank < nranks; ++rank) most = std::max(most, rows_of_rank(rank));
  return most + moe.spare_rows;
}

// Integers: -1, 0 or 1, a share of them not 0. Random: in [-1, 1), rounded to the dtype.
double MoeProblem::value(int kind, uint64_t a, uint64_t b, uint64_t c, double share) const {
  const uint64_t hash = mix(mix(mix(mix(moe.seed * 16 + static_cast<uint64_t>(kind)) + a) + b) + c);
  const double unit = static_cast<double>(hash >> 11) * 0x1p-53;
  if (!moe.integers) return decode(encode(2 * unit - 1, moe.dtype), moe.dtype);
  if (unit >= share) return 0;
  return hash & 1 ? 1 : -1;
}

double MoeProblem::x(int rank, int64_t token, int64_t column) const {
  const double share = std::min(1.0, 64.0 / static_cast<double>(moe.hidden));
  return value(kX, static_cast<uint64_t>(rank), static_cast<uint64_t>(token), static_cast<uint64_t>(column),
               share);
}
double MoeProblem::w_in(int expert, int64_t row, int64_t column) const {
  return value(kWIn, static_cast<uint64_t>(expert), static_cast<uint64_t>(row), static_cast<uint64_t>(column),
               0.7);
}
double MoeProblem::w_out(int expert, int64_t row, int64_t column) const {
  return value(kWOut, static_cast<uint64_t>(expert), static_cast<uint64_t>(row), static_cast<uint64_t>(column),
               0.7);
}
// Few non-zero elements, so that sums over topk rows stay integers that 8 bits hold.
double MoeProblem::expert_row(const MoeRow& row, int64_t column) const {
  const double share = std::min(1.0, 48.0 / static_cast<double>(moe.topk * moe.inter));
  return value(kRow, static_cast<uint64_t>(row.rank) << 32 | static_cast<uint64_t>(row.token),
               static_cast<uint64_t>(row.k), static_cast<uint64_t>(column), share);
}
double MoeProblem::scale(int rank, int64_t token, int k) const {
  if (!moe.row_scale) return 1;
  return 1 +
         static_cast<double>(mix(moe.seed + static_cast<uint64_t>(kScale + rank * 64 + token * 16 + k)) % 2);
}
double MoeProblem::weight(int rank, int64_t token, int k) const {
  return (static_cast<int>(mix(moe.seed + static_cast<uint64_t>(kWeight + rank * 64 + token * 16 + k)) % 5) -
          2) *
         0.5;
}

std::vector<double> MoeProblem::dispatched(int expert, const MoeRow& row) const {
  std::vector<double> sums(static_cast<size_t>(moe.inter));
  for (int64_t h = 0; h < moe.hidden; ++h) {
    const double factor = x(row.rank, row.token, h);
    if (factor == 0) continue;
    for (int64_t i = 0; i < moe.inter; ++i) sums[static_cast<size_t>(i)] += factor * w_in(expert, h, i);
  }
  for (double& sum : sums) sum *= scale(row.rank, row.token, row.k);
  return sums;
}

std::vector<double> MoeProblem::combined(int rank, int64_t token) const {
  std::vector<double> sums(static_cast<size_t>(moe.hidden));
  for (int k = 0; k < moe.topk; ++k) {
    const int64_t to = expert(rank, token, k);
    if (to < 0) continue;
    for (int64_t i = 0; i < moe.inter; ++i) {
      const double factor = weight(rank, token, k) * expert_row({rank, token, k}, i);
      if (factor == 0) continue;
      for (int64_t h = 0; h < moe.hidden; ++h)
        sums[static_cast<size_t>(h)] += factor * w_out(static_cast<int>(to), i, h);
    }
  }
  return sums;
}

}  // namespace mk::test
