// SPDX-License-Identifier: MIT
// Who holds, computes and sends what in an attention, against counting it key by key; and its inputs.
#include <algorithm>
#include <cmath>
#include <set>
#include <vector>

#include "attention_work.h"
#include "element.h"
#include "test/support/catch.h"

using namespace perf;

namespace {

Shape shape_of(int64_t seq, int64_t causal, int64_t zigzag, int64_t packed = 0) {
  return {{"batch", 2}, {"seq", seq},       {"heads", 6},       {"kv_heads", 3},
          {"dim", 16},  {"causal", causal}, {"zigzag", zigzag}, {"packed", packed}};
}

std::vector<Shape> small_shapes() {
  std::vector<Shape> shapes;
  for (const int64_t seq : {1, 7, 37, 64}) {
    for (const int64_t packed : {0, 1, 3, 16}) {
      shapes.push_back(shape_of(seq, 0, 0, packed));
      shapes.push_back(shape_of(seq, 1, 0, packed));
      shapes.push_back(shape_of(seq, 1, 1, packed));
    }
  }
  return shapes;
}

std::vector<int64_t> listed(const AttentionPositions& positions) {
  std::vector<int64_t> list;
  for (int64_t row = 0; row < positions.rows(); ++row) list.push_back(positions.of_row(row));
  return list;
}

bool sees(const Shape& shape, int64_t query, int64_t key) {
  const AttentionSequences sequences = attention_sequences(shape);
  return sequences.of(query) == sequences.of(key) && (!shape["causal"] || key <= query);
}

// Keys of `owner` of which some query of `reader` sees one.
int64_t keys_seen(const Shape& shape, int owner, int reader, int nranks) {
  const std::vector<int64_t> queries = listed(attention_positions(shape, reader, nranks));
  int64_t seen = 0;
  for (const int64_t key : listed(attention_positions(shape, owner, nranks)))
    seen += std::any_of(queries.begin(), queries.end(), [&](int64_t query) { return sees(shape, query, key); });
  return seen;
}

}  // namespace

TEST_CASE("every position has one rank, and a rank's rows rise") {
  for (const Shape& shape : small_shapes()) {
    for (const int nranks : {1, 2, 3, 8}) {
      std::set<int64_t> all;
      for (int rank = 0; rank < nranks; ++rank) {
        const std::vector<int64_t> own = listed(attention_positions(shape, rank, nranks));
        CHECK(std::is_sorted(own.begin(), own.end()));
        for (const int64_t position : own) CHECK(all.insert(position).second);
      }
      CHECK(static_cast<int64_t>(all.size()) == shape["seq"]);
      CHECK(*all.rbegin() == shape["seq"] - 1);
    }
  }
  CHECK(listed(attention_positions(shape_of(8, 1, 1), 1, 2)) == std::vector<int64_t>{2, 3, 4, 5});
}

TEST_CASE("pairs are those that the mask leaves") {
  for (const Shape& shape : small_shapes()) {
    for (const int nranks : {1, 2, 3, 8}) {
      int64_t all = 0;
      int64_t most = 0;
      for (int rank = 0; rank < nranks; ++rank) {
        int64_t own = 0;
        for (const int64_t query : listed(attention_positions(shape, rank, nranks)))
          for (int64_t key = 0; key < shape["seq"]; ++key) own += sees(shape, query, key);
        CHECK(visible_pairs(shape, attention_positions(shape, rank, nranks)) == static_cast<double>(own));
        all += own;
        most = std::max(most, own);
      }
      CHECK(all_visible_pairs(shape) == static_cast<double>(all));
      CHECK(most_visible_pairs(shape, nranks) == static_cast<double>(most));
    }
  }
}

TEST_CASE("one rank alone has as much to do as the busiest") {
  for (const Shape& shape : small_shapes()) {
    if (shape["packed"] > 3) continue;  // of a few positions
    for (const int nranks : {2, 3, 8}) {
      const AloneShape alone = attention_alone_shape(shape, nranks);
      CHECK(alone.shape["heads"] == shape["heads"]);
      CHECK(alone.shape["causal"] == shape["causal"]);
      CHECK(alone.shape["zigzag"] == 0);
      CHECK(alone.shape["packed"] == shape["packed"]);
      const double pairs = all_visible_pairs(alone.shape) * alone.factor;
      CHECK(std::abs(pairs - most_visible_pairs(shape, nranks)) < 1e-9 * pairs);
    }
  }
  const AloneShape exact = attention_alone_shape(shape_of(6144, 0, 0), 4);
  CHECK(exact.shape["seq"] == 3072);
  CHECK(exact.factor == 1);
  // 6144 / sqrt(2) = 4344.5
  const AloneShape rounded = attention_alone_shape(shape_of(6144, 0, 0), 2);
  CHECK(rounded.shape["seq"] == 4352);
  CHECK(rounded.factor == 6144.0 * 6144 / 2 / (4352.0 * 4352));
  const AloneShape zigzag = attention_alone_shape(shape_of(6144, 1, 1), 4);
  CHECK(zigzag.shape["seq"] == 3072);
  CHECK(zigzag.factor == 6144.0 * 6145 / 4 / (3072.0 * 3073));
  // In order the last rank has 7/16 of all pairs: 4064.
  CHECK(attention_alone_shape(shape_of(6144, 1, 0), 4).shape["seq"] == 4096);
}

TEST_CASE("bytes of an attention's busiest rank") {
  for (const Shape& shape : small_shapes()) {
    for (const int nranks : {1, 2, 3, 8}) {
      // Keys and values of 3 heads of 16 in two batches, in 16 bits; gradients in 32.
      const int64_t position_bytes = 2 * 2 * 3 * 16 * 2;
      int64_t forward = 0;
      int64_t backward = 0;
      for (int rank = 0; rank < nranks; ++rank) {
        int64_t sent = 0;
        int64_t returned = 0;
        for (int other = 0; other < nranks; ++other) {
          if (other == rank) continue;
          sent += position_bytes * keys_seen(shape, rank, other, nranks);
          returned += 2 * position_bytes * keys_seen(shape, other, rank, nranks);
        }
        forward = std::max(forward, sent);
        backward = std::max(backward, sent + returned);
      }
      CHECK(attention_link_bytes(shape, nranks, false) == static_cast<double>(forward));
      CHECK(attention_link_bytes(shape, nranks, true) == static_cast<double>(backward));
    }
  }
}

TEST_CASE("inputs are what InputMatrix gives, and what rounding while storing gives") {
  for (const mk_dtype_t dtype : {MK_DTYPE_BF16, MK_DTYPE_FP16}) {
    const AttentionInputs in = {2, 37, 6, 3, 48, true, Pattern::kRandom, dtype, 0xa77};
    AttentionInputs one_hot = in;
    one_hot.pattern = Pattern::kIntegers;
    const InputMatrix q = {Pattern::kRandom, dtype, 0xa77 + 1, 1};
    const InputMatrix k = {Pattern::kRandom, dtype, 0xa77 + 2, 1};
    const InputMatrix v = {Pattern::kIntegers, dtype, 0xa77 + 3, 1};
    bool equal = true;
    const auto expect = [&](bool holds) { equal = equal && holds; };
    for (int64_t position = 0; position < in.seq; ++position) {
      for (int d = 0; d < in.dim; ++d) {
        const int64_t row = (1 * in.seq + position) * in.kv_heads + 2;
        const int64_t query_row = (1 * in.seq + position) * in.heads + 2;
        const bool has_bit = d < 40;
        const int64_t picked = one_hot.picked(1, position, 2);
        expect(in.q(1, position, 2, d) == 2 * q.value(query_row, d));
        expect(in.k(1, position, 2, d) == 2 * k.value(row, d));
        expect(one_hot.k(1, position, 2, d) == (has_bit ? (position >> d & 1 ? 1.0f : -1.0f) : 0.0f));
        expect(one_hot.q(1, position, 2, d) == (has_bit ? (picked >> d & 1 ? 64.0f : -64.0f) : 0.0f));
        expect(one_hot.v(1, position, 2, d) == v.value(row, d));
        expect(picked <= position);
        for (const AttentionTensor tensor : {AttentionTensor::kQ, AttentionTensor::kDO})
          expect(round_to(dtype, one_hot.unrounded(tensor, 1, position, 2, d)) ==
                 one_hot.unrounded(tensor, 1, position, 2, d));
      }
    }
    CHECK(equal);
    CHECK(in.heads_of(AttentionTensor::kDO) == 6);
    CHECK(in.heads_of(AttentionTensor::kV) == 3);
  }
}
