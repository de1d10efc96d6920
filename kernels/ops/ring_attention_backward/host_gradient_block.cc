// SPDX-License-Identifier: MIT
#include "host_gradient_block.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace mk::ring_attention_backward {

using ring_attention::add_scaled;
using ring_attention::HeadRows;
using ring_attention::KeyRange;
using ring_attention::kMostTileRows;

namespace {

constexpr int kPitch = kMostTileRows;

float dot(const float* a, const float* b, int dim) {
  float sum = 0;
  for (int d = 0; d < dim; ++d) sum += a[d] * b[d];
  return sum;
}

}  // namespace

GradientScratch::GradientScratch(int dim) : dim_(dim), lse_(kPitch), delta_(kPitch) {
  for (auto* rows : {&queries_, &outputs_, &d_outputs_, &keys_, &keys_transposed_, &values_transposed_})
    rows->resize(static_cast<size_t>(dim) * kPitch);
  weights_.resize(kPitch * kPitch);
  d_weights_.resize(kPitch * kPitch);
  ranges_.resize(kPitch);
}

void GradientScratch::load_queries(const QueryTile& tile) {
  rows_ = tile.rows;
  tile.queries.load(rows_, queries_.data());
  tile.outputs.load(rows_, outputs_.data());
  tile.d_outputs.load(rows_, d_outputs_.data());
  for (int i = 0; i < rows_; ++i) {
    const int64_t at = int64_t{i} * dim_;
    lse_[static_cast<size_t>(i)] = tile.lse[i];
    delta_[static_cast<size_t>(i)] = dot(d_outputs_.data() + at, outputs_.data() + at, dim_);
  }
}

void GradientScratch::load_keys(const HeadRows& keys, const HeadRows& values, int count) {
  count_ = count;
  keys.load(count, keys_.data());
  keys.load_transposed(count, keys_transposed_.data());
  values.load_transposed(count, values_transposed_.data());
}

void GradientScratch::weigh(const KeyRange* visible_rows, int64_t begin, float scale) {
  ring_attention::multiply_transposed(queries_.data(), rows_, keys_transposed_.data(), dim_, weights_.data());
  ring_attention::multiply_transposed(d_outputs_.data(), rows_, values_transposed_.data(), dim_,
                                      d_weights_.data());
  for (int i = 0; i < rows_; ++i) {
    const auto at = static_cast<size_t>(i);
    KeyRange range{std::max(visible_rows[i].begin - begin, int64_t{0}),
                   std::min(visible_rows[i].end - begin, int64_t{count_})};
    if (lse_[at] == -std::numeric_limits<float>::infinity()) range.end = range.begin;
    float* weights = weights_.data() + i * kPitch;
    float* d_weights = d_weights_.data() + i * kPitch;
    for (int64_t j = range.begin; j < range.end; ++j) {
      weights[j] = std::exp(scale * weights[j] - lse_[at]);
      d_weights[j] = weights[j] * (d_weights[j] - delta_[at]);
    }
    ranges_[at] = range;
  }
}

void GradientScratch::add_to_d_queries(float* d_queries) const {
  for (int i = 0; i < rows_; ++i) {
    const KeyRange range = ranges_[static_cast<size_t>(i)];
    for (int64_t j = range.begin; j < range.end; ++j) {
      add_scaled(d_queries + int64_t{i} * dim_, d_weights_[static_cast<size_t>(i * kPitch + j)],
                 keys_.data() + j * dim_, dim_);
    }
  }
}

void GradientScratch::add_to_d_keys_values(float* d_keys, float* d_values) const {
  for (int i = 0; i < rows_; ++i) {
    const KeyRange range = ranges_[static_cast<size_t>(i)];
    const int64_t row = int64_t{i} * dim_;
    for (int64_t j = range.begin; j < range.end; ++j) {
      const auto at = static_cast<size_t>(i * kPitch + j);
      add_scaled(d_keys + j * dim_, d_weights_[at], queries_.data() + row, dim_);
      add_scaled(d_values + j * dim_, weights_[at], d_outputs_.data() + row, dim_);
    }
  }
}

}  // namespace mk::ring_attention_backward
