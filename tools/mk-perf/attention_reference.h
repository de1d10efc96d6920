// SPDX-License-Identifier: MIT
// Attention in float64, in the plainest order: inputs as functions of their indices, and the expected rows of
// one rank's outputs and gradients.
#pragma once

#include <cstdint>
#include <vector>

#include "input_matrix.h"
#include "mkernel.h"

namespace perf {

// Tensors are [batch][position][head][dim].
struct AttentionInputs {
  int64_t batch;
  int64_t seq;
  int heads;
  int kv_heads;
  int dim;
  bool causal;
  Pattern pattern;
  mk_dtype_t dtype;
  uint64_t seed;

  // kRandom: as in InputMatrix. kIntegers: keys are the bits of their position as +-1, and a query is 64 times
  // the key of one position that it sees: the logits of all other keys are smaller by 128 and more, whose
  // exponential is zero in fp32. So o is a row of v, which has small integers, dv a sum of rows of d_o, and dq
  // and dk are zero.
  float q(int64_t b, int64_t position, int head, int d) const;
  float k(int64_t b, int64_t position, int head, int d) const;
  float v(int64_t b, int64_t position, int head, int d) const;
  float d_o(int64_t b, int64_t position, int head, int d) const;

  float scale() const;  // as it is given to the library: 1 for integers, 0 (the default) for random inputs
  int64_t num_visible(int64_t position) const { return causal ? position + 1 : seq; }
  int64_t picked(int64_t b, int64_t position, int head) const;  // kIntegers: the key of a query
};

// Rows of a rank's tensors: a row is [batch][row][head] with BSHD, `dim` values. Reference values are rounded
// to the dtype for integers.
struct AttentionReference {
  std::vector<int64_t> query_rows;  // of o, dq and lse
  std::vector<double> o;            // [query_rows][dim]
  std::vector<double> lse;          // [query_rows]
  std::vector<double> dq;
  std::vector<int64_t> key_rows;  // of dk and dv; none where that would take too long
  std::vector<double> dk;
  std::vector<double> dv;
  bool whole = true;  // every row
};

// positions: of the sequence, that the rank holds. All rows if that costs at most `max_products`, else a seeded
// choice; with random inputs then no keys, since one key's gradient takes every query's softmax.
AttentionReference attention_reference(const AttentionInputs& inputs, const std::vector<int64_t>& positions,
                                       bool backward, int64_t max_products);

}  // namespace perf
