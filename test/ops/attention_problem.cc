// SPDX-License-Identifier: MIT
#include "attention_problem.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <random>

#include "element.h"

namespace mk::test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

std::vector<int64_t> slice(int64_t begin, int64_t end, int64_t parts, int64_t part) {
  const int64_t length = (end - begin + parts - 1) / parts;
  std::vector<int64_t> positions;
  for (int64_t at = begin + part * length; at < std::min(end, begin + (part + 1) * length); ++at)
    positions.push_back(at);
  return positions;
}

double rounded(double value, mk_dtype_t dtype) { return decode(encode_number(value, dtype), dtype); }

}  // namespace

uint32_t encode_number(double value, mk_dtype_t dtype) {
  const uint32_t infinity = dtype == MK_DTYPE_FP32 ? 0x7f800000u : dtype == MK_DTYPE_FP16 ? 0x7c00u : 0x7f80u;
  const uint32_t sign = dtype == MK_DTYPE_FP32 ? 0x80000000u : 0x8000u;
  if (std::isinf(value)) return value > 0 ? infinity : sign | infinity;
  return encode(value, dtype);
}

std::vector<int64_t> AttentionCase::positions(int nranks, int rank) const {
  if (causal != MK_CAUSAL_ZIGZAG) return slice(0, seq, nranks, rank);
  std::vector<int64_t> all;
  const std::vector<int32_t> whole{0, static_cast<int32_t>(seq)};
  const std::vector<int32_t>& bounds = cu_seqlens.empty() ? whole : cu_seqlens;
  for (size_t at = 0; at + 1 < bounds.size(); ++at) {
    for (const int part : {rank, 2 * nranks - 1 - rank}) {
      const auto more = slice(bounds[at], bounds[at + 1], 2 * nranks, part);
      all.insert(all.end(), more.begin(), more.end());
    }
  }
  return all;
}

std::pair<int64_t, int64_t> AttentionCase::visible(int64_t position) const {
  int64_t begin = 0;
  int64_t end = seq;
  for (size_t at = 0; at + 1 < cu_seqlens.size(); ++at) {
    if (cu_seqlens[at] > position || position >= cu_seqlens[at + 1]) continue;
    begin = cu_seqlens[at];
    end = cu_seqlens[at + 1];
  }
  if (causal != MK_CAUSAL_NONE) end = position + 1;
  return {begin, end};
}

double AttentionCase::scale() const {
  return softmax_scale != 0 ? static_cast<double>(softmax_scale) : 1 / std::sqrt(static_cast<double>(dim));
}

double AttentionCase::tolerance() const { return dtype == MK_DTYPE_FP16 ? 1e-3 : 5e-3; }

std::string describe(const AttentionCase& attention) {
  std::string text =
      "b" + std::to_string(attention.batch) + " s" + std::to_string(attention.seq) + " h" +
      std::to_string(attention.heads) + "/" + std::to_string(attention.kv_heads) + " d" +
      std::to_string(attention.dim) + " causal " + std::to_string(attention.causal) + " layout " +
      std::to_string(attention.layout) + " dtype " + std::to_string(attention.dtype) + " numbers " +
      std::to_string(static_cast<int>(attention.numbers)) + " seed " + std::to_string(attention.seed) +
      " chunk_bytes " + std::to_string(attention.tuning.chunk_bytes);
  for (const int32_t bound : attention.cu_seqlens) text += " " + std::to_string(bound);
  return text;
}

AttentionProblem::AttentionProblem(const AttentionCase& attention_in)
    : attention(attention_in),
      q(attention.batch, attention.seq, attention.heads, attention.dim),
      k(attention.batch, attention.seq, attention.kv_heads, attention.dim),
      v(k),
      d_o(q),
      o(q),
      dq(q),
      dk(k),
      dv(k),
      lse(attention.batch, attention.seq, attention.heads, 1) {
  if (attention.rounded_factors) dq_terms = q, dk_terms = k;
  std::fill(dq_terms.at.begin(), dq_terms.at.end(), 0.0);
  std::fill(dk_terms.at.begin(), dk_terms.at.end(), 0.0);
  draw();
  for (int64_t batch = 0; batch < attention.batch; ++batch) {
    for (int head = 0; head < attention.heads; ++head) {
      for (int64_t position = 0; position < attention.seq; ++position) attend(batch, head, position);
    }
  }
}

void AttentionProblem::draw() {
  std::mt19937_64 random(attention.seed);
  const auto below = [&](int64_t bound) {
    return static_cast<double>(random() % static_cast<uint64_t>(bound));
  };
  const auto fill = [&](Tensor& tensor, auto number) {
    for (double& value : tensor.at) value = rounded(number(), attention.dtype);
  };
  const auto fraction = [&] { return below(2001) / 1000 - 1; };
  const auto small = [&] { return below(5) - 2; };
  fill(q, fraction);
  fill(k, fraction);
  fill(v, fraction);
  fill(d_o, fraction);
  if (attention.numbers == Numbers::uniform) {
    std::fill(k.at.begin(), k.at.end(), 0.0);
    fill(v, small);
  } else if (attention.numbers == Numbers::one_hot) {
    fill(v, small);
    fill(d_o, small);
    draw_one_hot();
  } else if (attention.numbers == Numbers::large) {
    fill(q, [&] { return below(81) - 40; });
    fill(k, [&] { return below(81) - 40; });
    const int64_t stride = int64_t{k.heads} * k.dim;
    for (int64_t batch = 0; batch < attention.batch; ++batch) {
      for (int64_t position = 1; position < attention.seq; position += 2)
        std::copy_n(k.row(batch, position - 1, 0), stride, k.row(batch, position, 0));
    }
  } else if (attention.numbers == Numbers::rising) {
    draw_rising();
  } else if (attention.numbers == Numbers::masked) {
    draw_masked();
  }
}

// With a scale of 1, logits change by up to 8 in 128 keys; an offset of 40 is more than all else together.
void AttentionProblem::draw_rising() {
  for (int64_t batch = 0; batch < attention.batch; ++batch) {
    for (int64_t position = 0; position < attention.seq; ++position) {
      for (int head = 0; head < attention.heads; ++head) {
        double* row = q.row(batch, position, head);
        for (int d = 0; d < attention.dim; ++d) row[d] /= 4;
        row[0] = std::array{1.0, 0.25, 0.0, -0.25, -1.0}[static_cast<size_t>(position % 5)];
        row[1] = std::array{40.0, 0.0, -40.0}[static_cast<size_t>(position % 3)];
      }
      for (int head = 0; head < attention.kv_heads; ++head) {
        double* row = k.row(batch, position, head);
        for (int d = 0; d < attention.dim; ++d) row[d] /= 4;
        row[0] = rounded(static_cast<double>(position - attention.seq / 2) / 16, attention.dtype);
        row[1] = 1;
      }
    }
  }
}

// Keys are the bits of their position as +-1, a query 64 times those of a key that it sees: that key's logit is
// larger than all others by 128 and more, and exp(-128) is zero in fp32.
void AttentionProblem::draw_one_hot() {
  std::mt19937_64 random(attention.seed + 77);
  const auto code = [&](double* row, int64_t position, double factor) {
    for (int d = 0; d < attention.dim; ++d) row[d] = d >= 8 ? 0 : position >> d & 1 ? factor : -factor;
  };
  for (int64_t batch = 0; batch < attention.batch; ++batch) {
    for (int64_t position = 0; position < attention.seq; ++position) {
      for (int head = 0; head < attention.kv_heads; ++head) code(k.row(batch, position, head), position, 1);
      const auto [begin, end] = attention.visible(position);
      for (int head = 0; head < attention.heads; ++head) {
        const auto pick = static_cast<int64_t>(random() % static_cast<uint64_t>(end - begin));
        code(q.row(batch, position, head), begin + pick, 64);
      }
    }
  }
}

// The first element of every query is 4; of the keys of a third of the positions, and of all of the first ones,
// the largest negative number: their product is -inf in fp32. The rest of a query is zero.
void AttentionProblem::draw_masked() {
  const double lowest = attention.dtype == MK_DTYPE_FP16 ? -kInfinity : decode(0xff7f, MK_DTYPE_BF16);
  for (int64_t batch = 0; batch < attention.batch; ++batch) {
    for (int64_t position = 0; position < attention.seq; ++position) {
      for (int head = 0; head < attention.heads; ++head) {
        double* row = q.row(batch, position, head);
        std::fill(row, row + attention.dim, 0.0);
        row[0] = 4;
      }
      const bool hidden = position % 3 == 0 || attention.visible(position).first + 5 > position;
      for (int head = 0; head < attention.kv_heads; ++head)
        k.row(batch, position, head)[0] = hidden ? lowest : position % 2;
    }
  }
}

// One query: its output, its share of all gradients.
void AttentionProblem::attend(int64_t batch, int head, int64_t position) {
  const int kv_head = head / (attention.heads / attention.kv_heads);
  const auto [begin, end] = attention.visible(position);
  const double scale = attention.scale();
  const auto dot = [&](const double* a, const double* b) {
    double sum = 0;
    for (int d = 0; d < attention.dim; ++d) sum += a[d] * b[d];
    return sum;
  };
  std::vector<double> weights;
  double maximum = -kInfinity;
  for (int64_t key = begin; key < end; ++key) {
    double logit = scale * dot(q.row(batch, position, head), k.row(batch, key, kv_head));
    if (logit < -static_cast<double>(std::numeric_limits<float>::max())) logit = -kInfinity;  // as in fp32
    weights.push_back(logit);
    maximum = std::max(maximum, logit);
  }
  double* const output = o.row(batch, position, head);
  *lse.row(batch, position, head) = -kInfinity;
  if (maximum == -kInfinity) return;
  double sum = 0;
  for (double& weight : weights) sum += weight = std::exp(weight - maximum);
  *lse.row(batch, position, head) = maximum + std::log(sum);
  for (int64_t key = begin; key < end; ++key) {
    double& weight = weights[static_cast<size_t>(key - begin)];
    for (int d = 0; d < attention.dim; ++d) output[d] += weight * v.row(batch, key, kv_head)[d];
    weight /= sum;
  }
  // The quotient of two integers, rounded once: what an exact comparison expects.
  for (int d = 0; d < attention.dim; ++d)
    output[d] = exact_outputs() ? static_cast<double>(static_cast<float>(output[d]) / static_cast<float>(sum))
                                : output[d] / sum;
  const double* const d_output = d_o.row(batch, position, head);
  std::vector<double> given(output, output + attention.dim);
  for (double& value : given) value = attention.rounded_o ? rounded(value, attention.dtype) : value;
  const double delta = dot(d_output, given.data());
  for (int64_t key = begin; key < end; ++key) {
    const double weight = weights[static_cast<size_t>(key - begin)];
    if (weight == 0) continue;
    const double d_weight = dot(d_output, v.row(batch, key, kv_head));
    const double d_logit = scale * weight * (d_weight - delta);
    if (attention.rounded_factors) {
      const double term = scale * weight * (std::abs(d_weight) + std::abs(delta));
      for (int d = 0; d < attention.dim; ++d) {
        dq_terms.row(batch, position, head)[d] += std::abs(term * k.row(batch, key, kv_head)[d]);
        dk_terms.row(batch, key, kv_head)[d] += std::abs(term * q.row(batch, position, head)[d]);
      }
    }
    for (int d = 0; d < attention.dim; ++d) {
      dq.row(batch, position, head)[d] += d_logit * k.row(batch, key, kv_head)[d];
      dk.row(batch, key, kv_head)[d] += d_logit * q.row(batch, position, head)[d];
      dv.row(batch, key, kv_head)[d] += weight * d_output[d];
    }
  }
}

}  // namespace mk::test
