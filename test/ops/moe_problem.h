// SPDX-License-Identifier: MIT
// A whole expert layer, dispatch and combine, with its inputs as functions of indices and its expected results
// from plain loops.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "mkernel.h"

namespace mk::test {

enum class Spread {
  even,        // distinct experts at random
  one_expert,  // every token to the last expert, and nowhere else
  few,         // two experts in all
  half,        // every second entry dropped
  nowhere      // all dropped
};

struct MoeCase {
  int64_t tokens = 8;  // of a rank, about
  bool same_tokens = false;
  int64_t hidden = 16;
  int64_t inter = 8;
  int experts = 8;
  int topk = 2;
  Spread spread = Spread::even;
  mk_dtype_t dtype = MK_DTYPE_BF16;
  mk_dtype_t out_dtype = MK_DTYPE_BF16;
  mk_layout_t w_layout = MK_LAYOUT_KN;
  mk_index_type_t index_type = MK_INDEX_INT32;
  bool row_scale = false;
  bool dispatched_rows = false;
  bool integers = true;    // exact; else random numbers and a tolerance
  int64_t spare_rows = 0;  // of capacity, beyond what is needed
  int padding = 0;         // of leading dimensions, in units of 16 bytes
  mk_tuning_t tuning = MK_TUNING_INIT;
  uint64_t seed = 1;

  int64_t tokens_of(int rank) const;
  double tolerance() const;
};
std::string describe(const MoeCase& moe);

struct MoeRow {
  int rank;
  int64_t token;
  int k;
};

class MoeProblem {
 public:
  MoeProblem(const MoeCase& moe, int nranks);

  int first_expert(int rank) const;
  int num_experts(int rank) const;
  int64_t expert(int rank, int64_t token, int k) const {
    return experts_[static_cast<size_t>(rank)][static_cast<size_t>(token * moe.topk + k)];
  }
  const std::vector<MoeRow>& rows(int expert) const { return rows_[static_cast<size_t>(expert)]; }
  int64_t rows_of_rank(int rank) const;
  int64_t capacity() const;

  // Inputs, exactly as the dtype has them.
  double x(int rank, int64_t token, int64_t column) const;
  double w_in(int expert, int64_t row, int64_t column) const;   // [hidden, inter]
  double w_out(int expert, int64_t row, int64_t column) const;  // [inter, hidden]
  double expert_row(const MoeRow& row, int64_t column) const;   // [inter], a combine's input
  double scale(int rank, int64_t token, int k) const;
  double weight(int rank, int64_t token, int k) const;

  // Results.
  std::vector<double> dispatched(int expert, const MoeRow& row) const;  // [inter]
  std::vector<double> combined(int rank, int64_t token) const;          // [hidden]

  const MoeCase moe;
  const int nranks;

 private:
  double value(int kind, uint64_t a, uint64_t b, uint64_t c, double share) const;

  std::vector<std::vector<int64_t>> experts_;  // [rank][token * topk + k]
  std::vector<std::vector<MoeRow>> rows_;      // [expert], in their order
};

}  // namespace mk::test
