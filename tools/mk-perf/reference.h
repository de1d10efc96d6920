// SPDX-License-Identifier: MIT
// The product in float64, in the plainest order, and the comparison of an output with it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "input_matrix.h"
#include "mkernel.h"

namespace perf {

// The part of a global matrix that a rank holds.
struct Window {
  int64_t row = 0;
  int64_t col = 0;
  int64_t rows = 0;
  int64_t cols = 0;
};

// Rows and columns (relative to a window) that are compared with the reference.
struct Sample {
  std::vector<int64_t> rows;
  std::vector<int64_t> cols;
  bool whole = true;
};

// All of a window whose reference costs at most `max_products`; else a seeded choice of rows and columns, first
// and last among them, of about that cost.
Sample choose_sample(const Window& window, int64_t inner, int64_t max_products, uint64_t seed);

// sum over k < inner of a(row, k) * b(k, col), for the sampled rows and columns of the window: [rows][cols].
std::vector<double> reference_product(const InputMatrix& a, const InputMatrix& b, int64_t inner,
                                      const Window& window, const Sample& sample);

// Adds to `sums`, [rows][cols] of the sample, what `matrix` has there.
void add_sample(const InputMatrix& matrix, const Window& window, const Sample& sample,
                std::vector<double>& sums);

// An output in host memory.
struct Output {
  const void* data;
  mk_dtype_t dtype;
  int64_t rows;
  int64_t cols;
  int64_t ld;
};

struct Comparison {
  bool complete =
      true;  // nothing of the window is NaN or infinite, and nothing beyond a row's last element was written
  bool exact = true;  // equal to the reference everywhere (0 equals -0)
  double squared_error = 0;
  double squared_reference = 0;
  int64_t num_elements = 0;
  std::string problem;  // the first element that is not as it should be

  // |output - reference| / |reference|, of n elements n / (n + 64) times that: of a few it scatters, most where
  // what is summed up cancels out. Where the reference is zero everywhere, the root mean square of the output.
  double relative_error() const;
  void merge(const Comparison& other);
};

// Compares the sampled elements with `reference`, and all elements, between-row padding included, with the
// poison. A difference is a problem where `must_be_exact`.
Comparison compare(const Output& output, const Sample& sample, const std::vector<double>& reference,
                   bool must_be_exact);

}  // namespace perf
