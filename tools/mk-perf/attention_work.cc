// SPDX-License-Identifier: MIT
#include "attention_work.h"

#include <algorithm>
#include <cmath>

namespace perf {
namespace {

constexpr int64_t kAloneMultiple = 128;

// Keys of `owner` that some query of `reader` sees.
double keys_seen(const Shape& shape, const AttentionPositions& owner, const AttentionPositions& reader) {
  if (!reader.rows()) return 0;
  if (!shape["causal"]) return static_cast<double>(owner.rows());
  const int64_t last = reader.of_row(reader.rows() - 1);
  double keys = 0;
  for (int run = 0; run < 2; ++run)
    keys += static_cast<double>(std::clamp<int64_t>(last + 1 - owner.first[run], 0, owner.count[run]));
  return keys;
}

}  // namespace

AttentionPositions attention_positions(const Shape& shape, int rank, int nranks) {
  AttentionPositions positions;
  const int64_t seq = shape["seq"];
  const bool zigzag = shape["zigzag"] != 0;
  const int64_t parts = zigzag ? 2 * nranks : nranks;
  const int64_t length = (seq + parts - 1) / parts;
  for (int run = 0; run < (zigzag ? 2 : 1); ++run) {
    const int64_t part = run == 0 ? rank : parts - 1 - rank;
    positions.first[run] = std::min(seq, part * length);
    positions.count[run] = std::min(seq, (part + 1) * length) - positions.first[run];
  }
  return positions;
}

double visible_pairs(const Shape& shape, const AttentionPositions& queries) {
  double pairs = 0;
  for (int run = 0; run < 2; ++run) {
    const auto first = static_cast<double>(queries.first[run]);
    const auto count = static_cast<double>(queries.count[run]);
    pairs += count * (shape["causal"] ? first + (count + 1) / 2 : static_cast<double>(shape["seq"]));
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
                       {"zigzag", 0}},
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
