// SPDX-License-Identifier: MIT
#include "reference.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <numeric>

#include "element.h"

namespace perf {
namespace {

std::vector<int64_t> choose_indices(int64_t size, int64_t count, uint64_t seed) {
  std::vector<int64_t> indices;
  if (count >= size) {
    indices.resize(static_cast<size_t>(size));
    std::iota(indices.begin(), indices.end(), 0);
    return indices;
  }
  indices = {0, size - 1};
  for (uint64_t draw = 0; static_cast<int64_t>(indices.size()) < count; ++draw) {
    indices.push_back(static_cast<int64_t>(index_hash(seed, draw, 0) % static_cast<uint64_t>(size)));
  }
  std::sort(indices.begin(), indices.end());
  indices.erase(std::unique(indices.begin(), indices.end()), indices.end());
  return indices;
}

std::string describe(int64_t row, int64_t col, double expected, double seen) {
  char text[160];
  std::snprintf(text, sizeof text, "row %lld, column %lld: expected %.9g, saw %.9g",
                static_cast<long long>(row), static_cast<long long>(col), expected, seen);
  return text;
}

// What can be said without a reference.
void check_written(const Output& output, Comparison& result) {
  const auto note = [&](const std::string& problem) {
    result.complete = false;
    if (result.problem.empty()) result.problem = problem;
  };
  for (int64_t row = 0; row < output.rows && result.complete; ++row) {
    for (int64_t col = 0; col < output.cols && result.complete; ++col) {
      const float seen = load_element(output.dtype, output.data, row * output.ld + col);
      if (!std::isfinite(seen)) {
        const bool untouched = is_poison(output.dtype, output.data, row * output.ld + col);
        note("row " + std::to_string(row) + ", column " + std::to_string(col) +
             (untouched ? ": never written" : ": expected a finite number, saw " + std::to_string(seen)));
      }
    }
    const int64_t row_end = row + 1 < output.rows ? output.ld : output.cols;
    for (int64_t col = output.cols; col < row_end && result.complete; ++col) {
      if (!is_poison(output.dtype, output.data, row * output.ld + col)) {
        note("row " + std::to_string(row) + ": written beyond its last element, at column " +
             std::to_string(col) + " of " + std::to_string(output.cols));
      }
    }
  }
}

}  // namespace

Sample choose_sample(const Window& window, int64_t inner, int64_t max_products, uint64_t seed) {
  Sample sample;
  const double products =
      static_cast<double>(window.rows) * static_cast<double>(window.cols) * static_cast<double>(inner);
  int64_t rows = window.rows;
  int64_t cols = window.cols;
  sample.whole = products <= static_cast<double>(max_products);
  if (!sample.whole) {
    const auto side =
        static_cast<int64_t>(std::sqrt(static_cast<double>(max_products) / static_cast<double>(inner)));
    rows = std::clamp<int64_t>(side, 8, window.rows < 8 ? 8 : window.rows);
    cols = std::clamp<int64_t>(side * side / std::min(rows, window.rows), 8, window.cols < 8 ? 8 : window.cols);
  }
  sample.rows = choose_indices(window.rows, rows, seed);
  sample.cols = choose_indices(window.cols, cols, seed + 1);
  return sample;
}

std::vector<double> reference_product(const InputMatrix& a, const InputMatrix& b, int64_t inner,
                                      const Window& window, const Sample& sample) {
  const size_t rows = sample.rows.size();
  const size_t cols = sample.cols.size();
  std::vector<double> product(rows * cols, 0.0);
  std::vector<double> b_row(cols);
  for (int64_t k = 0; k < inner; ++k) {
    for (size_t col = 0; col < cols; ++col) b_row[col] = b.value(k, window.col + sample.cols[col]);
    for (size_t row = 0; row < rows; ++row) {
      const double a_value = a.value(window.row + sample.rows[row], k);
      if (a_value == 0.0) continue;
      double* sums = product.data() + row * cols;
      for (size_t col = 0; col < cols; ++col) sums[col] += a_value * b_row[col];
    }
  }
  return product;
}

void add_sample(const InputMatrix& matrix, const Window& window, const Sample& sample,
                std::vector<double>& sums) {
  auto sum = sums.begin();
  for (const int64_t row : sample.rows) {
    for (const int64_t col : sample.cols) *sum++ += matrix.value(window.row + row, window.col + col);
  }
}

double Comparison::relative_error() const {
  if (squared_error == 0) return 0;
  const auto count = static_cast<double>(num_elements);
  const double squared = squared_reference > 0 ? squared_reference : count;
  return std::sqrt(squared_error / squared) * (count / (count + 64));
}

void Comparison::merge(const Comparison& other) {
  complete = complete && other.complete;
  exact = exact && other.exact;
  squared_error += other.squared_error;
  squared_reference += other.squared_reference;
  num_elements += other.num_elements;
  if (problem.empty()) problem = other.problem;
}

Comparison compare(const Output& output, const Sample& sample, const std::vector<double>& reference,
                   bool must_be_exact) {
  Comparison result;
  check_written(output, result);
  result.num_elements = static_cast<int64_t>(reference.size());
  for (size_t i = 0; i < sample.rows.size(); ++i) {
    for (size_t j = 0; j < sample.cols.size(); ++j) {
      const int64_t row = sample.rows[i];
      const int64_t col = sample.cols[j];
      const double expected = reference[i * sample.cols.size() + j];
      const double seen = load_element(output.dtype, output.data, row * output.ld + col);
      const double error = seen - expected;
      result.squared_error += std::isfinite(error) ? error * error : INFINITY;
      result.squared_reference += expected * expected;
      if (seen == expected) continue;
      if (must_be_exact && result.problem.empty()) result.problem = describe(row, col, expected, seen);
      result.exact = false;
    }
  }
  return result;
}

}  // namespace perf
