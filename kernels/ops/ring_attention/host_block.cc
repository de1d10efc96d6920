// SPDX-License-Identifier: MIT
#include "host_block.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "../../host/number_format.h"

namespace mk::ring_attention {
namespace {

constexpr float kNone = -std::numeric_limits<float>::infinity();
constexpr int kPitch = kMostTileRows;
// dim is a multiple of 8: loops of constant length are what the compiler turns into vector instructions.
constexpr int kStep = 8;

template <float (*Convert)(uint16_t)>
void convert_rows(const HeadRows& rows, int count, float* out) {
  for (int i = 0; i < count; ++i) {
    const uint16_t* row = rows.data + i * rows.stride;
    for (int d = 0; d < rows.dim; ++d) out[int64_t{i} * rows.dim + d] = Convert(row[d]);
  }
}

template <float (*Convert)(uint16_t)>
void convert_transposed(const HeadRows& rows, int count, float* out) {
  for (int i = 0; i < count; ++i) {
    const uint16_t* row = rows.data + i * rows.stride;
    for (int d = 0; d < rows.dim; ++d) out[d * kPitch + i] = Convert(row[d]);
  }
}

// The largest of the logits and `seed`; a NaN among them stays.
float largest(const float* logits, int64_t begin, int64_t end, float seed) {
  for (int64_t j = begin; j < end; ++j) {
    if (logits[j] > seed || std::isnan(logits[j])) seed = logits[j];
  }
  return seed;
}

void scale_row(float* row, float factor, int dim) {
  for (int d = 0; d < dim; ++d) row[d] *= factor;
}

}  // namespace

void HeadRows::load(int count, float* out) const {
  dtype == MK_DTYPE_FP16 ? convert_rows<fp16_to_float>(*this, count, out)
                         : convert_rows<bf16_to_float>(*this, count, out);
}

void HeadRows::load_transposed(int count, float* out) const {
  dtype == MK_DTYPE_FP16 ? convert_transposed<fp16_to_float>(*this, count, out)
                         : convert_transposed<bf16_to_float>(*this, count, out);
}

Part::Part(int rows, int dim)
    : values(static_cast<size_t>(rows) * static_cast<size_t>(dim)),
      maximum(static_cast<size_t>(rows), kNone),
      sum(static_cast<size_t>(rows)) {}

BlockScratch::BlockScratch(int dim)
    : keys(static_cast<size_t>(dim) * kPitch),
      values(keys.size()),
      queries(keys.size()),
      weights(kPitch * kPitch) {}

void multiply_transposed(const float* a, int rows, const float* b_transposed, int dim, float* out) {
  for (int i = 0; i < rows; ++i) {
    float* sums = out + i * kPitch;
    for (int j = 0; j < kPitch; ++j) sums[j] = 0;
    for (int d = 0; d < dim; ++d) {
      const float factor = a[int64_t{i} * dim + d];
      const float* row = b_transposed + d * kPitch;
      for (int j = 0; j < kPitch; ++j) sums[j] += factor * row[j];
    }
  }
}

void add_scaled(float* sum, float factor, const float* row, int dim) {
  for (int d = 0; d < dim; d += kStep) {
    for (int e = 0; e < kStep; ++e) sum[d + e] += factor * row[d + e];
  }
}

bool TileAgainstChunk::sees(int64_t begin, int64_t count) const {
  return std::any_of(visible, visible + rows, [&](const KeyRange& range) {
    return std::max(range.begin, begin) < std::min(range.end, begin + count);
  });
}

// The softmax over blocks of keys: with each block the sums so far are brought to the new maximum (Milakov and
// Gimelshein, Online normalizer calculation for softmax).
Part attend(const TileAgainstChunk& work, BlockScratch& scratch) {
  const int dim = work.queries.dim;
  Part part(work.rows, dim);
  work.queries.load(work.rows, scratch.queries.data());
  for (int64_t begin = 0; begin < work.num_keys; begin += work.block) {
    const int count = static_cast<int>(std::min<int64_t>(work.block, work.num_keys - begin));
    if (!work.sees(begin, count)) continue;
    work.keys.from(begin).load_transposed(count, scratch.keys.data());
    work.values.from(begin).load(count, scratch.values.data());
    multiply_transposed(scratch.queries.data(), work.rows, scratch.keys.data(), dim, scratch.weights.data());
    for (int i = 0; i < work.rows; ++i) {
      const int64_t first = std::max(work.visible[i].begin - begin, int64_t{0});
      const int64_t last = std::min(work.visible[i].end - begin, int64_t{count});
      float* weights = scratch.weights.data() + i * kPitch;
      for (int64_t j = first; j < last; ++j) weights[j] *= work.scale;
      const float maximum = largest(weights, first, last, part.maximum[i]);
      if (maximum == kNone) continue;  // nothing visible, or only logits of -inf
      float* values = part.values.data() + int64_t{i} * dim;
      const float correction = std::exp(part.maximum[i] - maximum);
      if (correction != 1) scale_row(values, correction, dim);
      float sum = part.sum[i] * correction;
      for (int64_t j = first; j < last; ++j) {
        const float weight = std::exp(weights[j] - maximum);
        sum += weight;
        add_scaled(values, weight, scratch.values.data() + j * dim, dim);
      }
      part.sum[i] = sum;
      part.maximum[i] = maximum;
    }
  }
  return part;
}

void merge_softmax(Part& into, const Part& from, int dim) {
  for (size_t i = 0; i < into.sum.size(); ++i) {
    if (from.maximum[i] == kNone) continue;
    const float maximum =
        largest(from.maximum.data(), static_cast<int64_t>(i), static_cast<int64_t>(i) + 1, into.maximum[i]);
    const float old_factor = std::exp(into.maximum[i] - maximum);
    const float new_factor = std::exp(from.maximum[i] - maximum);
    float* values = into.values.data() + i * static_cast<size_t>(dim);
    if (old_factor != 1) scale_row(values, old_factor, dim);
    add_scaled(values, new_factor, from.values.data() + i * static_cast<size_t>(dim), dim);
    into.sum[i] = into.sum[i] * old_factor + from.sum[i] * new_factor;
    into.maximum[i] = maximum;
  }
}

}  // namespace mk::ring_attention
