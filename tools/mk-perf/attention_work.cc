// SPDX-License-Identifier: MIT
#include "attention_work.h"

#include <algorithm>
#include <cmath>
#include <tuple>
#include <utility>

namespace perf {
namespace {

constexpr int64_t kAloneMultiple = 128;

int runs_of_sequence(const Shape& shape) { return shape["zigzag"] ? 2 : 1; }

// Keys of `owner` that some query of `reader` sees.
double keys_seen(const Shape& shape, const AttentionPositions& owner, const AttentionPositions& reader) {
  double keys = 0;
  const int runs = runs_of_sequence(shape);
  for (int begin = 0; begin < owner.num_runs; begin += runs) {  // of a sequence
    int64_t end = 0;
    for (int run = begin; run < begin + runs; ++run) {
      if (reader.count[run] > 0) end = reader.first[run] + reader.count[run];
    }
    for (int run = begin; run < begin + runs && end > 0; ++run) {
      const int64_t count = owner.count[run];
      keys +=
          static_cast<double>(shape["causal"] ? std::clamp<int64_t>(end - owner.first[run], 0, count) : count);
    }
  }
  return keys;
}

}  // namespace

AttentionSequences attention_sequences(const Shape& shape) {
  return {shape["seq"], static_cast<int>(std::max<int64_t>(1, shape["packed"]))};
}

AttentionPositions attention_positions(const Shape& shape, int rank, int nranks) {
  AttentionPositions positions;
  const AttentionSequences sequences = attention_sequences(shape);
  const auto slice = [&](int64_t begin, int64_t end, int64_t part, int64_t parts) {
    const int64_t length = (end - begin + parts - 1) / parts;
    const int64_t first = std::min(end, begin + part * length);
    return std::pair(first, std::min(end, first + length));
  };
  for (int sequence = 0; sequence < sequences.count; ++sequence) {
    const int64_t begin = sequences.begin(sequence), end = sequences.begin(sequence + 1);
    for (int run = 0; run < runs_of_sequence(shape); ++run) {
      auto [first, last] = slice(0, sequences.seq, rank, nranks);
      if (shape["zigzag"]) {
        std::tie(first, last) = slice(begin, end, run == 0 ? rank : 2 * nranks - 1 - rank, 2 * nranks);
      } else {
        first = std::clamp(first, begin, end), last = std::clamp(last, begin, end);
      }
      positions.first[positions.num_runs] = first;
      positions.count[positions.num_runs++] = last - first;
    }
  }
  return positions;
}

double visible_pairs(const Shape& shape, const AttentionPositions& queries) {
  double pairs = 0;
  const AttentionSequences sequences = attention_sequences(shape);
  for (int run = 0; run < queries.num_runs; ++run) {
    const int sequence = run / runs_of_sequence(shape);
    const auto begin = static_cast<double>(sequences.begin(sequence));
    const auto end = static_cast<double>(sequences.begin(sequence + 1));
    const auto first = static_cast<double>(queries.first[run]);
    const auto count = static_cast<double>(queries.count[run]);
    pairs += count * (shape["causal"] ? first - begin + (count + 1) / 2 : end - begin);
  }
  return pairs;
}

double all_visible_pairs(const Shape& shape) { return most_visible_pairs(shape, 1); }

double most_visible_pairs(const Shape& shape, int nranks) {
  double most = 0;
  for (int rank = 0; rank < nranks; ++rank)
    most = std::max(most, visible_pairs(shape, attention_positions(shape, rank, nranks)));
  return most;
}

AloneShape attention_alone_shape(const Shape& shape, int nranks) {
  const double pairs = most_visible_pairs(shape, nranks);
  const double exact = static_cast<double>(shape["seq"]) * std::sqrt(pairs / all_visible_pairs(shape));
  // Of a short sequence a multiple would be far off.
  const int64_t multiple = exact < kAloneMultiple ? 1 : kAloneMultiple;
  const int64_t seq = std::max<int64_t>(1, std::llround(exact / static_cast<double>(multiple)) * multiple);
  // One rank's zigzag slices are the whole sequence in order.
  AloneShape alone = {{{"batch", shape["batch"]},
                       {"seq", seq},
                       {"heads", shape["heads"]},
                       {"kv_heads", shape["kv_heads"]},
                       {"dim", shape["dim"]},
                       {"causal", shape["causal"]},
                       {"zigzag", 0},
                       {"packed", shape["packed"]}},
                      1};
  alone.factor = pairs / all_visible_pairs(alone.shape);
  return alone;
}

double attention_link_bytes(const Shape& shape, int nranks, bool backward) {
  const auto elements = static_cast<double>(2 * shape["batch"] * shape["kv_heads"] * shape["dim"]);
  double most = 0;
  for (int rank = 0; rank < nranks; ++rank) {
    const AttentionPositions own = attention_positions(shape, rank, nranks);
    double bytes = 0;
    for (int other = 0; other < nranks; ++other) {
      if (other == rank) continue;
      const AttentionPositions theirs = attention_positions(shape, other, nranks);
      bytes += 2 * elements * keys_seen(shape, own, theirs);
      if (backward) bytes += 4 * elements * keys_seen(shape, theirs, own);
    }
    most = std::max(most, bytes);
  }
  return most;
}

}  // namespace perf
