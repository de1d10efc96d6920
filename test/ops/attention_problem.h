// SPDX-License-Identifier: MIT
// One ring attention as a test sees it: what is asked, inputs made from a seed, and o, lse and gradients by an
// independent float64 loop over the whole sequence.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "mkernel.h"

namespace mk::test {

enum class Numbers {
  random,
  uniform,  // keys are zero: every visible key has the same weight; o is exact
  one_hot,  // every query picks one key: o and gradients are exact
  large,    // logits of up to some 1e4, integers; every key twice, so that maxima are equal
  rising,   // logits rise or fall with the position, quickly, slowly or not; some queries' are all negative
  masked    // many logits are -inf, all of some queries'
};

struct AttentionCase {
  int64_t batch = 1;
  int64_t seq = 0;
  int heads = 1;
  int kv_heads = 1;
  int dim = 64;
  mk_causal_t causal = MK_CAUSAL_NONE;
  mk_attention_layout_t layout = MK_ATTENTION_BSHD;
  mk_dtype_t dtype = MK_DTYPE_BF16;
  float softmax_scale = 0;
  std::vector<int32_t> cu_seqlens;  // empty: not packed
  mk_tuning_t tuning = MK_TUNING_INIT;
  Numbers numbers = Numbers::random;
  uint64_t seed = 1;
  // Gradients are expected for the rounded o that the backward call is given; else for o itself, from which
  // they differ by more than their own rounding where a query sees few keys.
  bool rounded_o = true;
  // What keys and queries are multiplied by for their gradients is rounded to the dtype before, as where tensor
  // cores do it: where all but rounding cancels out, errors are relative to what is added up.
  bool rounded_factors = false;

  int num_sequences() const { return cu_seqlens.empty() ? 0 : static_cast<int>(cu_seqlens.size()) - 1; }
  // Positions of the whole sequence that a rank holds, in the order of its rows.
  std::vector<int64_t> positions(int nranks, int rank) const;
  // Keys that the query at `position` sees: [first, second).
  std::pair<int64_t, int64_t> visible(int64_t position) const;
  double scale() const;
  double tolerance() const;
};

std::string describe(const AttentionCase& attention);

// [batch][seq][heads][dim]
struct Tensor {
  int64_t seq = 0;
  int heads = 0;
  int dim = 0;
  std::vector<double> at;

  Tensor() = default;
  Tensor(int64_t batch, int64_t seq_in, int heads_in, int dim_in)
      : seq(seq_in),
        heads(heads_in),
        dim(dim_in),
        at(static_cast<size_t>(batch * seq_in * heads_in * dim_in)) {}
  double* row(int64_t batch, int64_t position, int head) {
    return at.data() + ((batch * seq + position) * heads + head) * dim;
  }
  const double* row(int64_t batch, int64_t position, int head) const {
    return at.data() + ((batch * seq + position) * heads + head) * dim;
  }
};

// Read-only once made: all ranks of a job share one. Inputs are rounded to the dtype.
struct AttentionProblem {
  explicit AttentionProblem(const AttentionCase& attention);

  AttentionCase attention;
  Tensor q, k, v, d_o;
  Tensor o, dq, dk, dv;       // expected
  Tensor lse;                 // expected, dim 1
  Tensor dq_terms, dk_terms;  // sums of the magnitudes that dq and dk are added up of; rounded_factors alone

  bool exact_outputs() const {
    return attention.numbers == Numbers::uniform || attention.numbers == Numbers::one_hot;
  }
  bool exact_gradients() const { return attention.numbers == Numbers::one_hot; }

 private:
  void draw();
  void draw_one_hot();
  void draw_rising();
  void draw_masked();
  void attend(int64_t batch, int head, int64_t position);
};

uint32_t encode_number(double value, mk_dtype_t dtype);  // infinities too

}  // namespace mk::test
