// SPDX-License-Identifier: MIT
// Attention in float64, in the plainest order: the expected rows of one rank's outputs and gradients.
#pragma once

#include <cstdint>
#include <vector>

#include "attention_inputs.h"

namespace perf {

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
