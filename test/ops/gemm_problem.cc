// SPDX-License-Identifier: MIT
#include "gemm_problem.h"

#include <algorithm>
#include <cmath>
#include <sstream>

#include "element.h"

namespace mk::test {
namespace {

// splitmix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014).
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t next() {
    uint64_t z = state_ += 0x9e3779b97f4a7c15ull;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    return z ^ z >> 31;
  }
  double unit() { return static_cast<double>(next() >> 11) * 0x1p-53; }

 private:
  uint64_t state_;
};

// bf16 holds every integer up to here.
constexpr double kLargestInteger = 256;

const char* name_of(mk_dtype_t dtype) {
  return dtype == MK_DTYPE_BF16   ? "bf16"
         : dtype == MK_DTYPE_FP16 ? "fp16"
         : dtype == MK_DTYPE_FP32 ? "fp32"
                                  : "default";
}

const char* name_of(mk_operator_t op) {
  return op == MK_OPERATOR_ALLGATHER_GEMM        ? "allgather_gemm"
         : op == MK_OPERATOR_GEMM_REDUCE_SCATTER ? "gemm_reduce_scatter"
                                                 : "gemm_allreduce";
}

// sum over kk of A[row, kk] * B[kk, column], row by row.
void multiply_add(const Values& a, int64_t row, const Values& b, std::vector<double>& sums) {
  for (int64_t kk = 0; kk < a.columns; ++kk) {
    const double factor = a(row, kk);
    if (factor == 0) continue;
    for (int64_t column = 0; column < b.columns; ++column)
      sums[static_cast<size_t>(column)] += factor * b(kk, column);
  }
}

}  // namespace

int64_t GemmCase::owned_begin(int nranks, int rank) const {
  return std::min(m, (m + nranks - 1) / nranks * rank);
}

int64_t GemmCase::leading_dimension(int64_t columns, mk_dtype_t type) const {
  const int64_t unit = 16 / element_size(type);
  return ((columns + unit - 1) / unit + padding) * unit;
}

double GemmCase::tolerance() const {
  const mk_dtype_t travels = gathers()                        ? MK_DTYPE_FP32
                             : comm_dtype != MK_DTYPE_DEFAULT ? comm_dtype
                             : out_dtype == MK_DTYPE_FP32     ? dtype
                                                              : out_dtype;
  const auto of = [](mk_dtype_t type) {
    return type == MK_DTYPE_BF16 ? 5e-3 : type == MK_DTYPE_FP16 ? 1e-3 : 1e-4;
  };
  return std::max(of(out_dtype), of(travels));
}

std::string describe(const GemmCase& gemm) {
  static constexpr const char* kGathered[] = {"none", "plain", "symmetric", "symmetric_uneven", "mixed"};
  std::ostringstream text;
  text << name_of(gemm.op) << (gemm.wgrad ? " wgrad" : "") << " m=" << gemm.m << " n=" << gemm.n
       << " k=" << gemm.k << " step=" << gemm.local_step << " " << name_of(gemm.dtype) << "->"
       << name_of(gemm.out_dtype) << " comm=" << name_of(gemm.comm_dtype)
       << (gemm.b_layout == MK_LAYOUT_NK ? " NK" : " KN") << (gemm.accumulate ? " accumulate" : "")
       << (gemm.bias ? std::string(" bias=") + name_of(gemm.bias_dtype) : "") << " padding=" << gemm.padding
       << " gathered=" << kGathered[static_cast<int>(gemm.gathered)] << (gemm.registered ? " registered" : "")
       << " tile=" << gemm.tuning.tile_m << "x" << gemm.tuning.tile_n << " chunk=" << gemm.tuning.chunk_bytes
       << " compute=" << gemm.tuning.compute_ctas << " seed=" << gemm.seed;
  return text.str();
}

GemmProblem::GemmProblem(const GemmCase& gemm_in, int nranks_in) : gemm(gemm_in), nranks(nranks_in) {
  if (!gemm.integers) {
    draw(0, 1);
    multiply();
    return;
  }
  double density = 1;
  draw(2, density);
  if (multiply()) return;
  do {
    draw(1, density);
    density /= 2;
  } while (!multiply());
}

// amplitude 0: numbers in [-1, 1]; else integers in [-amplitude, amplitude], a share `density` of them not 0.
void GemmProblem::draw(double amplitude, double density) {
  Random random(gemm.seed * 1000003 + static_cast<uint64_t>(gemm.op));
  const auto fill = [&](Values& values, mk_dtype_t type, double share) {
    for (double& value : values.at) {
      if (amplitude == 0) {
        value = decode(encode(2 * random.unit() - 1, type), type);
      } else {
        value = random.unit() < share ? std::floor(random.unit() * (2 * amplitude + 1)) - amplitude : 0;
      }
    }
  };
  a.clear(), b.clear(), bias.clear(), c_before.clear();
  for (int rank = 0; rank < nranks; ++rank) {
    fill(a.emplace_back(gemm.a_rows(nranks, rank), gemm.a_columns(rank)), gemm.dtype, density);
    fill(b.emplace_back(gemm.b_rows(rank), gemm.b_columns(rank)), gemm.dtype, 1);
    fill(bias.emplace_back(1, gemm.bias ? gemm.n_of(rank) : 0), gemm.bias_dtype, 1);
    fill(c_before.emplace_back(gemm.accumulate ? gemm.c_rows(nranks, rank) : 0, gemm.n_of(rank)),
         gemm.out_dtype, 1);
  }
}

// Row `i` of `owner`'s for every rank of an all-gather; the largest magnitude.
double GemmProblem::multiply_gathered(int owner, int64_t i) {
  const Values& own = a[static_cast<size_t>(owner)];
  const int64_t row = gemm.owned_begin(nranks, owner) + i;
  std::copy_n(own.at.begin() + i * gemm.k, gemm.k, gathered.at.begin() + row * gemm.k);
  double largest = 0;
  for (size_t rank = 0; rank < c.size(); ++rank) {
    std::vector<double> sums(static_cast<size_t>(c[rank].columns));
    multiply_add(own, i, b[rank], sums);
    for (size_t j = 0; j < sums.size(); ++j) {
      c[rank](row, static_cast<int64_t>(j)) = sums[j] + (gemm.bias ? bias[rank].at[j] : 0);
      largest = std::max(largest, std::fabs(sums[j]));
    }
  }
  return largest;
}

// Row `i` of `owner`'s, summed over the ranks; a bound of the sum of any of them.
double GemmProblem::multiply_reduced(int owner, int64_t i) {
  const int64_t row = gemm.owned_begin(nranks, owner) + i;
  const auto n = static_cast<size_t>(gemm.n);
  std::vector<double> sums(n), total(n), magnitudes(n);
  for (size_t rank = 0; rank < c.size(); ++rank) {
    std::fill(sums.begin(), sums.end(), 0);
    multiply_add(a[rank], row, b[rank], sums);
    for (size_t j = 0; j < n; ++j) {
      total[j] += sums[j];
      magnitudes[j] += std::fabs(sums[j]);
    }
  }
  const bool scatters = gemm.op == MK_OPERATOR_GEMM_REDUCE_SCATTER;
  for (int rank = 0; rank < nranks; ++rank) {
    if (scatters && rank != owner) continue;
    for (size_t j = 0; j < n; ++j) {
      c[static_cast<size_t>(rank)](scatters ? i : row, static_cast<int64_t>(j)) =
          total[j] + (gemm.bias ? bias[static_cast<size_t>(owner)].at[j] : 0);
    }
  }
  return n == 0 ? 0 : *std::max_element(magnitudes.begin(), magnitudes.end());
}

// Mode WGRAD, whole; a bound of every sum on the way.
double GemmProblem::multiply_wgrad() {
  for (int owner = 0; owner < nranks; ++owner) {
    const Values& own = a[static_cast<size_t>(owner)];
    std::copy(own.at.begin(), own.at.end(), gathered.at.begin() + gemm.owned_begin(nranks, owner) * gemm.n);
  }
  double largest = 0;
  for (size_t rank = 0; rank < c.size(); ++rank) {
    for (int64_t i = 0; i < c[rank].rows; ++i) {
      for (int64_t j = 0; j < gemm.n; ++j) {
        double sum = 0;
        double magnitude = 0;
        for (int64_t row = 0; row < gemm.m; ++row) {
          const double product = b[rank](row, i) * gathered(row, j);
          sum += product;
          magnitude += std::fabs(product);
        }
        c[rank](i, j) = sum;
        largest = std::max(largest, magnitude);
      }
    }
  }
  return largest;
}

bool GemmProblem::multiply() {
  gathered = gemm.gathers() ? Values(gemm.m, gemm.a_columns(0)) : Values();
  c.clear();
  for (int rank = 0; rank < nranks; ++rank) c.emplace_back(gemm.c_rows(nranks, rank), gemm.n_of(rank));
  double largest = gemm.wgrad ? multiply_wgrad() : 0;
  for (int owner = 0; owner < nranks && !gemm.wgrad; ++owner) {
    for (int64_t i = 0; i < gemm.owned_rows(nranks, owner); ++i) {
      largest = std::max(largest, gemm.gathers() ? multiply_gathered(owner, i) : multiply_reduced(owner, i));
    }
  }
  for (size_t rank = 0; rank < c.size() && gemm.accumulate; ++rank) {
    for (size_t at = 0; at < c[rank].at.size(); ++at) c[rank].at[at] += c_before[rank].at[at];
  }
  return largest + 4 <= kLargestInteger;  // 2 of the bias, 2 of the C that was there
}

}  // namespace mk::test
