// SPDX-License-Identifier: MIT
#include "attention_reference.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "element.h"
#include "reference.h"

namespace perf {
namespace {

// Row-major values of one (batch, head).
using Rows = std::vector<double>;

double dot(const double* a, const double* b, int dim) { return std::inner_product(a, a + dim, b, 0.0); }

class Builder {
 public:
  Builder(const AttentionInputs& inputs, const std::vector<int64_t>& positions, AttentionReference& result)
      : in_(inputs), positions_(positions), result_(result), scale_(inputs.scale()) {
    if (scale_ == 0) scale_ = 1 / std::sqrt(static_cast<double>(in_.dim));
    own_row_.assign(static_cast<size_t>(in_.seq), -1);
    for (size_t row = 0; row < positions.size(); ++row)
      own_row_[static_cast<size_t>(positions[row])] = static_cast<int64_t>(row);
  }

  // The queries asked for, and with `keys` what all queries of the sequence give to this rank's keys.
  void run(bool keys) {
    for (int64_t b = 0; b < in_.batch; ++b) {
      for (int kv_head = 0; kv_head < in_.kv_heads; ++kv_head) {
        bool loaded = false;  // as costly as what follows; a small sample asks for few heads
        const int group = in_.heads / in_.kv_heads;
        for (int head = kv_head * group; head < (kv_head + 1) * group; ++head) {
          const std::vector<int64_t> queries = keys ? all_positions() : asked(b, head);
          if (!loaded && !queries.empty()) load_keys(b, kv_head);
          loaded = loaded || !queries.empty();
          for (const int64_t position : queries) attend(b, head, position, keys);
        }
      }
    }
  }

  // kIntegers: dv alone, from which query picked which key.
  void count_picks() {
    const auto dim = static_cast<size_t>(in_.dim);
    const int group = in_.heads / in_.kv_heads;
    for (size_t at = 0; at < result_.key_rows.size(); ++at) {
      const int64_t row = result_.key_rows[at];
      const int kv_head = static_cast<int>(row % in_.kv_heads);
      const auto own = static_cast<int64_t>(positions_.size());
      const int64_t b = row / in_.kv_heads / own;
      const int64_t key = positions_[static_cast<size_t>(row / in_.kv_heads % own)];
      for (int head = kv_head * group; head < (kv_head + 1) * group; ++head) {
        for (int64_t query = 0; query < in_.seq; ++query) {
          if (in_.picked(b, query, head) != key) continue;
          for (size_t d = 0; d < dim; ++d)
            result_.dv[at * dim + d] += static_cast<double>(in_.d_o(b, query, head, static_cast<int>(d)));
        }
      }
    }
  }

 private:
  void load_keys(int64_t b, int kv_head) {
    const int64_t dim = in_.dim;
    keys_.resize(static_cast<size_t>(in_.seq * dim));
    values_.resize(keys_.size());
    for (int64_t position = 0; position < in_.seq; ++position) {
      for (int d = 0; d < in_.dim; ++d) {
        keys_[static_cast<size_t>(position * dim + d)] = in_.k(b, position, kv_head, d);
        values_[static_cast<size_t>(position * dim + d)] = in_.v(b, position, kv_head, d);
      }
    }
  }

  std::vector<int64_t> all_positions() const {
    std::vector<int64_t> positions(static_cast<size_t>(in_.seq));
    std::iota(positions.begin(), positions.end(), 0);
    return positions;
  }

  // Positions of the sampled queries of one head.
  std::vector<int64_t> asked(int64_t b, int head) const {
    std::vector<int64_t> found;
    const auto own = static_cast<int64_t>(positions_.size());
    for (const int64_t row : result_.query_rows) {
      if (row % in_.heads == head && row / in_.heads / own == b)
        found.push_back(positions_[static_cast<size_t>(row / in_.heads % own)]);
    }
    return found;
  }

  // Where a row of this rank stands in the reference; -1: not there.
  static int64_t place(const std::vector<int64_t>& rows, int64_t row) {
    const auto found = std::lower_bound(rows.begin(), rows.end(), row);
    return found != rows.end() && *found == row ? found - rows.begin() : -1;
  }

  void attend(int64_t b, int head, int64_t position, bool keys) {
    const int dim = in_.dim;
    std::vector<double> query(static_cast<size_t>(dim)), d_output(query), output(query);
    for (int d = 0; d < dim; ++d) {
      query[static_cast<size_t>(d)] = in_.q(b, position, head, d);
      d_output[static_cast<size_t>(d)] = in_.d_o(b, position, head, d);
    }
    std::vector<double> weights(static_cast<size_t>(in_.num_visible(position)));
    const auto first = static_cast<size_t>(in_.first_visible(position));
    for (size_t j = 0; j < weights.size(); ++j)
      weights[j] = scale_ * dot(query.data(), keys_.data() + (first + j) * query.size(), dim);
    const double maximum = *std::max_element(weights.begin(), weights.end());
    double sum = 0;
    for (double& weight : weights) sum += weight = std::exp(weight - maximum);
    for (size_t j = 0; j < weights.size(); ++j) {
      weights[j] /= sum;
      for (size_t d = 0; d < output.size(); ++d)
        output[d] += weights[j] * values_[(first + j) * output.size() + d];
    }
    const int64_t own = own_row_[static_cast<size_t>(position)];
    const auto own_rows = static_cast<int64_t>(positions_.size());
    const int64_t at = own < 0 ? -1 : place(result_.query_rows, (b * own_rows + own) * in_.heads + head);
    if (at >= 0) {
      std::copy(output.begin(), output.end(), result_.o.begin() + at * dim);
      result_.lse[static_cast<size_t>(at)] = maximum + std::log(sum);
    }
    if (result_.dq.empty() && !keys) return;
    add_gradients(b, head, first, weights, query, d_output, output, at, keys);
  }

  void add_gradients(int64_t b, int head, size_t first, const std::vector<double>& weights,
                     const std::vector<double>& query, const std::vector<double>& d_output,
                     const std::vector<double>& output, int64_t at, bool keys) {
    const size_t dim = query.size();
    // The library is given o in its dtype.
    double delta = 0;
    for (size_t d = 0; d < dim; ++d)
      delta += d_output[d] * static_cast<double>(round_to(in_.dtype, static_cast<float>(output[d])));
    const auto own_rows = static_cast<int64_t>(positions_.size());
    const int kv_head = head / (in_.heads / in_.kv_heads);
    for (size_t j = 0; j < weights.size(); ++j) {
      const size_t key = first + j;
      const double* value = values_.data() + key * dim;
      const double d_logit = scale_ * weights[j] * (dot(d_output.data(), value, in_.dim) - delta);
      for (size_t d = 0; at >= 0 && d < dim; ++d)
        result_.dq[static_cast<size_t>(at) * dim + d] += d_logit * keys_[key * dim + d];
      const int64_t own = keys ? own_row_[key] : -1;
      if (own < 0) continue;
      const auto row = static_cast<size_t>((b * own_rows + own) * in_.kv_heads + kv_head);
      for (size_t d = 0; d < dim; ++d) {
        result_.dk[row * dim + d] += d_logit * query[d];
        result_.dv[row * dim + d] += weights[j] * d_output[d];
      }
    }
  }

  const AttentionInputs& in_;
  const std::vector<int64_t>& positions_;
  AttentionReference& result_;
  double scale_;
  std::vector<int64_t> own_row_;  // of a position, -1: another rank's
  Rows keys_, values_;
};

}  // namespace

float AttentionInputs::q(int64_t b, int64_t position, int head, int d) const {
  return round_to(dtype, unrounded(AttentionTensor::kQ, b, position, head, d));
}
float AttentionInputs::k(int64_t b, int64_t position, int head, int d) const {
  return round_to(dtype, unrounded(AttentionTensor::kK, b, position, head, d));
}
float AttentionInputs::v(int64_t b, int64_t position, int head, int d) const {
  return round_to(dtype, unrounded(AttentionTensor::kV, b, position, head, d));
}
float AttentionInputs::d_o(int64_t b, int64_t position, int head, int d) const {
  return round_to(dtype, unrounded(AttentionTensor::kDO, b, position, head, d));
}

float AttentionInputs::scale() const { return pattern == Pattern::kIntegers ? 1.0f : 0.0f; }

AttentionReference attention_reference(const AttentionInputs& inputs, const std::vector<int64_t>& positions,
                                       bool backward, int64_t max_products) {
  AttentionReference result;
  const auto own = static_cast<int64_t>(positions.size());
  const int64_t dim = inputs.dim;
  const Window queries{0, 0, inputs.batch * own * inputs.heads, dim};
  const Window keys{0, 0, inputs.batch * own * inputs.kv_heads, dim};
  // A gradient of keys takes every query of the sequence, whoever holds it.
  const double all = static_cast<double>(inputs.batch) * inputs.heads * static_cast<double>(inputs.seq) *
                     static_cast<double>(inputs.seq) * static_cast<double>(dim) * 4;
  const bool all_queries = backward && all <= static_cast<double>(max_products);
  const Sample sample = choose_sample(queries, 4 * inputs.seq, max_products, inputs.seed);
  result.whole = backward ? all_queries : sample.whole;
  result.query_rows = sample.rows;
  if (all_queries) {
    result.query_rows.resize(static_cast<size_t>(queries.rows));
    std::iota(result.query_rows.begin(), result.query_rows.end(), 0);
  }
  result.o.resize(result.query_rows.size() * static_cast<size_t>(dim));
  result.lse.resize(result.query_rows.size());
  if (backward) {
    result.dq.resize(result.o.size());
    if (all_queries) {
      result.key_rows.resize(static_cast<size_t>(keys.rows));
      std::iota(result.key_rows.begin(), result.key_rows.end(), 0);
    } else if (inputs.pattern == Pattern::kIntegers) {
      result.key_rows = choose_sample(keys, inputs.seq, max_products / 64, inputs.seed + 1).rows;
    }
    result.dk.resize(result.key_rows.size() * static_cast<size_t>(dim));
    result.dv.resize(result.dk.size());
  }
  Builder builder(inputs, positions, result);
  builder.run(all_queries);
  if (backward && !all_queries) builder.count_picks();
  if (inputs.pattern == Pattern::kIntegers) {
    for (auto* values : {&result.o, &result.dq, &result.dk, &result.dv}) {
      for (double& value : *values)
        value = static_cast<double>(round_to(inputs.dtype, static_cast<float>(value)));
    }
  }
  return result;
}

}  // namespace perf
