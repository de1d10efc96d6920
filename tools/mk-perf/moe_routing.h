// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "shape.h"

namespace perf {

struct Slice {
  int64_t begin;
  int64_t end;
};

// Rank r owns [r * ceil(count / W), ...), of tokens and of experts.
Slice slice_of(int64_t count, int rank, int nranks);

// A row of an expert: the k-th choice of a token of the whole batch.
struct ExpertRow {
  int64_t token;
  int k;
  int expert;
};

// Where every token of the batch goes; the same on every rank.
class ExpertRouting {
 public:
  ExpertRouting(const Shape& shape, int nranks);
  // Of tokens that chose `experts`, topk each.
  ExpertRouting(std::vector<int32_t> experts, int topk, int64_t num_experts, int nranks);

  int topk() const { return topk_; }
  int64_t num_tokens() const { return static_cast<int64_t>(experts_.size()) / topk_; }
  int64_t num_experts() const { return static_cast<int64_t>(first_rows_.size()) - 1; }

  // Rows of all experts are numbered expert by expert, and in the order of tokens.
  int64_t row_number(int64_t token, int k) const {
    return row_numbers_[static_cast<size_t>(token * topk_ + k)];
  }
  int64_t first_row(int64_t expert) const { return first_rows_[static_cast<size_t>(expert)]; }

  int expert(int64_t token, int k) const { return experts_[static_cast<size_t>(token * topk_ + k)]; }
  const int32_t* of_token(int64_t token) const { return experts_.data() + token * topk_; }
  int64_t capacity() const { return capacity_; }
  // In the order in which a rank gets them: expert, then token (which is: source rank, then token).
  std::vector<ExpertRow> rows_of(Slice experts) const;

 private:
  int topk_;
  std::vector<int32_t> experts_;
  std::vector<int64_t> first_rows_;
  std::vector<int64_t> row_numbers_;
  int64_t capacity_ = 0;
};

}  // namespace perf
