// SPDX-License-Identifier: MIT
// One launch of a GEMM operator as a test sees it: what is asked, inputs made from a seed, and the result by an
// independent loop.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "mkernel.h"

namespace mk::test {

enum class Gathered {
  none,
  plain,             // ordinary memory
  symmetric,         // mk_mem_alloc memory, the same offset on every rank: peers write it
  symmetric_uneven,  // mk_mem_alloc memory, another offset on odd ranks: the library stages
  mixed              // mk_mem_alloc memory on even ranks, ordinary memory on odd ones
};

struct GemmCase {
  mk_operator_t op = MK_OPERATOR_ALLGATHER_GEMM;
  int64_t m = 0;
  int64_t n = 0;           // of rank 0
  int64_t k = 0;           // of rank 0
  int64_t local_step = 0;  // what each next rank has more of its rank-local size: n (all-gather) or k
  bool wgrad = false;      // all-gather: a is X[m_r, n], b is dY[m, k], C = dY^T * gathered X
  mk_dtype_t dtype = MK_DTYPE_BF16;
  mk_dtype_t out_dtype = MK_DTYPE_BF16;
  mk_dtype_t comm_dtype = MK_DTYPE_DEFAULT;
  mk_layout_t b_layout = MK_LAYOUT_KN;
  bool accumulate = false;
  bool bias = false;
  mk_dtype_t bias_dtype = MK_DTYPE_BF16;
  int padding = 0;  // leading dimensions: 16-byte units beyond the shortest
  Gathered gathered = Gathered::none;
  bool registered = false;  // A in mk_mem_register memory
  mk_tuning_t tuning = MK_TUNING_INIT;
  bool integers = true;  // small integers, every partial sum exact; else random numbers in [-1, 1]
  uint64_t seed = 1;

  bool gathers() const { return op == MK_OPERATOR_ALLGATHER_GEMM; }
  mk_allgather_mode_t mode() const { return wgrad ? MK_ALLGATHER_WGRAD : MK_ALLGATHER_FORWARD; }
  bool forward() const { return gathers() && !wgrad; }
  int64_t n_of(int rank) const { return forward() ? n + rank * local_step : n; }
  int64_t k_of(int rank) const { return forward() ? k : k + rank * local_step; }
  int64_t owned_begin(int nranks, int rank) const;
  int64_t owned_rows(int nranks, int rank) const {
    return owned_begin(nranks, rank + 1) - owned_begin(nranks, rank);
  }
  int64_t a_rows(int nranks, int rank) const { return gathers() ? owned_rows(nranks, rank) : m; }
  int64_t a_columns(int rank) const { return wgrad ? n : k_of(rank); }
  int64_t b_rows(int rank) const { return wgrad ? m : k_of(rank); }
  int64_t b_columns(int rank) const { return wgrad ? k_of(rank) : n_of(rank); }
  int64_t c_rows(int nranks, int rank) const {
    return wgrad ? k_of(rank) : op == MK_OPERATOR_GEMM_REDUCE_SCATTER ? owned_rows(nranks, rank) : m;
  }
  int64_t leading_dimension(int64_t columns, mk_dtype_t type) const;
  // ||out - ref|| / ||ref|| that random numbers may have.
  double tolerance() const;
};

std::string describe(const GemmCase& gemm);

// Row-major values without padding.
struct Values {
  int64_t rows = 0;
  int64_t columns = 0;
  std::vector<double> at;

  Values() = default;
  Values(int64_t rows_in, int64_t columns_in)
      : rows(rows_in), columns(columns_in), at(static_cast<size_t>(rows_in * columns_in)) {}
  double& operator()(int64_t row, int64_t column) { return at[static_cast<size_t>(row * columns + column)]; }
  double operator()(int64_t row, int64_t column) const {
    return at[static_cast<size_t>(row * columns + column)];
  }
};

// Read-only once made: all ranks of a job share one.
struct GemmProblem {
  GemmProblem(const GemmCase& gemm, int nranks);

  GemmCase gemm;
  int nranks;
  std::vector<Values> a;         // by rank
  std::vector<Values> b;         // by rank, [k, n], or dY[m, k]
  std::vector<Values> bias;      // by rank, [1, n]
  std::vector<Values> c_before;  // by rank, when accumulating
  std::vector<Values> c;         // by rank, expected
  Values gathered;               // expected, all-gather only

 private:
  void draw(double amplitude, double density);
  double multiply_gathered(int owner, int64_t i);
  double multiply_reduced(int owner, int64_t i);
  double multiply_wgrad();
  bool multiply();  // false: a partial sum could be too large to be exact
};

}  // namespace mk::test
