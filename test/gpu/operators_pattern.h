// SPDX-License-Identifier: MIT
// Operands whose products are known in closed form, so that every element of every launch can be checked on the
// device for little: each row of A has two elements that are not zero, at places that the turn, the row and
// the rank decide (in mode WGRAD each column of dY has); B (there X) and bias are small integers. Every sum is
// an integer of at most 256 in magnitude (up to 20 ranks), which all types hold, so a lost, doubled or stale
// tile shows, whatever the order of sums. The turn is counted on the device: a replayed graph gets new
// operands, too.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>
#include <vector>

#include "mkernel.h"

namespace operators {

struct Problem {
  mk_operator_t op = MK_OPERATOR_NONE;
  int64_t m = 0, n = 0, k = 0;  // k: of the all-gather, or of rank 0's slice
  bool transposed = false;      // B is [n, k]
  mk_dtype_t dtype = MK_DTYPE_BF16;
  mk_dtype_t out = MK_DTYPE_BF16;
  mk_dtype_t comm = MK_DTYPE_DEFAULT;
  bool accumulate = false;
  bool bias = false;
  bool gathered = false;  // the gathered A is asked for
  mk_algorithm_t algorithm = MK_ALGORITHM_AUTO;
  int64_t k_less = 0;   // reductions, mode WGRAD: by how much the k of each next rank is less
  int64_t padding = 8;  // elements behind each row, which nobody may touch
  bool wgrad = false;   // the all-gather in mode WGRAD: a is X, b is dY
};
std::string describe(const Problem& problem, int nranks);

enum class Filling : int {
  pattern,  // as above: check_results knows the sums
  random,   // real numbers, for comparisons of bits
  spread,  // integers times a power of two for each rank: the order in which ranks are summed shows in the bits
};

// The matrices of one rank: rows, leading dimensions and addresses.
struct Operands {
  int op, wgrad, rank, nranks;
  int64_t m, n, k;          // k of this rank
  int64_t first_k, k_less;  // of rank 0
  int64_t a_rows, a_columns, a_first_row, b_rows, b_columns, c_rows, c_first_row;
  int64_t lda, ldb, ldc, ld_gathered;
  int dtype, out_dtype;
  int transposed, accumulate, has_bias, has_gathered;
  void *a, *b, *c, *bias, *gathered;
};

// The first wrong element, and how many there are.
struct Wrong {
  unsigned long long count;
  int claimed;
  int where;  // 0: C, 1: the gathered A, 2: a comparison of bits
  uint32_t turn;
  int label;  // the caller's
  long long row, column;
  float seen, expected;
};
std::string describe(const Wrong& wrong);

// Kernels, each enqueued on `stream`. `turn` and `wrong` are in device memory.
void next_turn(uint32_t* turn, cudaStream_t stream);
// Fills A, B and bias; poisons C and the gathered A, or fills C when the call accumulates.
void fill_operands(const Operands& to, Filling filling, const uint32_t* turn, cudaStream_t stream);
void check_results(const Operands& of, const uint32_t* turn, int label, Wrong* wrong, cudaStream_t stream);
void check_equal_bits(const void* one, const void* other, size_t bytes, int label, Wrong* wrong,
                      cudaStream_t stream);
// C against the sum over ranks, in fp32 and in their order, of `partials` [nranks][m][n], each rounded to
// comm_dtype first.
void check_ordered_sum(const Operands& of, const float* partials, mk_dtype_t comm_dtype, int label,
                       Wrong* wrong, cudaStream_t stream);
// One thread that is busy for `us`; the rest of the GPU is not.
void stall(int us, cudaStream_t stream);
// As many CTAs as there are SMs, which keep other kernels out for `us`.
void occupy(int us, cudaStream_t stream);
// out[i] = number, and a check that it is; for a collective beside the operators.
void fill_floats(float* to, size_t count, float value, cudaStream_t stream);
void check_floats(const float* of, size_t count, float value, int label, Wrong* wrong, cudaStream_t stream);
// Loads all of the above, so that no first launch waits for a kernel that waits for a peer.
void load_pattern_kernels(cudaStream_t stream);

// Bytes of each matrix that a problem needs on a rank.
struct Sizes {
  size_t a = 0, b = 0, c = 0, bias = 0, gathered = 0;
  void cover(const Problem& problem, int rank, int nranks);
  size_t total() const { return a + b + c + bias + gathered; }
};

// Device memory of one rank for problems of up to `sizes`, on the current device.
class Matrices {
 public:
  explicit Matrices(const Sizes& sizes);
  ~Matrices();
  Matrices(const Matrices&) = delete;
  Matrices& operator=(const Matrices&) = delete;
  Operands operands(const Problem& problem, int rank, int nranks) const;

 private:
  void* data_[5] = {};
};

mk_status_t prepare(mk_comm_t comm, const Problem& problem);
mk_status_t call(mk_comm_t comm, const Problem& problem, const Operands& operands, cudaStream_t stream);

}  // namespace operators
