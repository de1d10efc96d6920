// SPDX-License-Identifier: MIT
// Calls of the GEMM operators on small integers, for which every partial sum is representable: the result is
// right to the last bit or wrong.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "mkernel.h"

namespace mk::test {

// One rank's part of one call: operands, launch, check. Operands differ from seed to seed.
class ExactCall {
 public:
  ExactCall(mk_operator_t op, int nranks, int rank, uint64_t seed)
      : ExactCall(op, nranks, rank, seed, 5 * nranks - 1, 8, 16) {}
  // n a multiple of 4 (of 8 in mode WGRAD), k of 8, at most 64.
  ExactCall(mk_operator_t op, int nranks, int rank, uint64_t seed, int64_t m, int64_t n, int64_t k,
            mk_allgather_mode_t mode = MK_ALLGATHER_FORWARD)
      : op_(op),
        wgrad_(mode == MK_ALLGATHER_WGRAD),
        nranks_(nranks),
        rank_(rank),
        seed_(seed),
        m_(m),
        n_(n),
        k_(k) {
    const bool gathers = op == MK_OPERATOR_ALLGATHER_GEMM;
    const int64_t first_row = gathers ? begin(rank) : 0;
    const int64_t rows = gathers ? begin(rank + 1) - begin(rank) : m;
    const int64_t first_k = gathers && !wgrad_ ? 0 : rank * k;
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < (wgrad_ ? n : k); ++j)
        a_.push_back(bf16(element(1, first_row + i, wgrad_ ? j : first_k + j)));
    }
    for (int64_t i = 0; i < (wgrad_ ? m : k); ++i) {
      for (int64_t j = 0; j < (wgrad_ ? k : n); ++j)
        b_.push_back(bf16(wgrad_ ? element(2, i, first_k + j) : element(2, first_k + i, j)));
    }
    c_rows_ = wgrad_ ? k : op == MK_OPERATOR_GEMM_REDUCE_SCATTER ? begin(rank + 1) - begin(rank) : m;
    c_.assign(static_cast<size_t>(c_rows_ * n), std::numeric_limits<float>::quiet_NaN());
  }

  mk_status_t launch(mk_comm_t comm) {
    switch (op_) {
      case MK_OPERATOR_ALLGATHER_GEMM: {
        mk_allgather_gemm_args_t args = MK_ALLGATHER_GEMM_ARGS_INIT;
        fill(args);
        if (wgrad_) args.mode = MK_ALLGATHER_WGRAD;
        return mk_allgather_gemm(comm, &args, nullptr);
      }
      case MK_OPERATOR_GEMM_REDUCE_SCATTER: {
        mk_gemm_reduce_scatter_args_t args = MK_GEMM_REDUCE_SCATTER_ARGS_INIT;
        fill(args);
        return mk_gemm_reduce_scatter(comm, &args, nullptr);
      }
      default: {
        mk_gemm_allreduce_args_t args = MK_GEMM_ALLREDUCE_ARGS_INIT;
        fill(args);
        return mk_gemm_allreduce(comm, &args, nullptr);
      }
    }
  }

  template <class Args>
  void fill(Args& args) {
    args.m = m_, args.n = n_, args.k = k_;
    args.dtype = MK_DTYPE_BF16, args.out_dtype = MK_DTYPE_FP32;
    args.a = a_.data(), args.lda = wgrad_ ? n_ : k_;
    args.b = b_.data(), args.ldb = wgrad_ ? k_ : n_;
    args.c = c_.data(), args.ldc = n_;
  }

  // "" when every element of the result is right.
  std::string wrong() const {
    const int64_t inner = wgrad_ ? m_ : op_ == MK_OPERATOR_ALLGATHER_GEMM ? k_ : nranks_ * k_;
    const int64_t first = op_ == MK_OPERATOR_GEMM_REDUCE_SCATTER ? begin(rank_) : 0;
    for (int64_t i = 0; i < c_rows_; ++i) {
      for (int64_t j = 0; j < n_; ++j) {
        int sum = 0;
        for (int64_t l = 0; l < inner; ++l) {
          sum += wgrad_ ? element(2, l, rank_ * k_ + i) * element(1, l, j)
                        : element(1, first + i, l) * element(2, l, j);
        }
        const float seen = c_[static_cast<size_t>(i * n_ + j)];
        if (seen == static_cast<float>(sum)) continue;
        return "rank " + std::to_string(rank_) + ", operator " + std::to_string(op_) + ", row " +
               std::to_string(i) + ", column " + std::to_string(j) + ": expected " + std::to_string(sum) +
               ", saw " + std::to_string(seen);
      }
    }
    return "";
  }

 private:
  int64_t begin(int rank) const {
    const int64_t share = (m_ + nranks_ - 1) / nranks_;
    return share * rank < m_ ? share * rank : m_;
  }
  // -1, 0 or 1.
  int element(uint64_t matrix, int64_t row, int64_t column) const {
    uint64_t mixed = seed_ * 0x9e3779b97f4a7c15ull + matrix * 0xbf58476d1ce4e5b9ull +
                     static_cast<uint64_t>(row) * 0x94d049bb133111ebull +
                     static_cast<uint64_t>(column) * 0xd6e8feb86659fd93ull;
    mixed = (mixed ^ mixed >> 32) * 0xd6e8feb86659fd93ull;
    return static_cast<int>((mixed >> 40) % 3) - 1;
  }
  static uint16_t bf16(int value) {
    return value == 0 ? 0 : static_cast<uint16_t>(value > 0 ? 0x3f80 : 0xbf80);
  }

  const mk_operator_t op_;
  const bool wgrad_;
  const int nranks_;
  const int rank_;
  const uint64_t seed_;
  const int64_t m_, n_, k_;
  int64_t c_rows_;
  std::vector<uint16_t> a_, b_;
  std::vector<float> c_;
};

// A launch, waited for and checked on this rank: the status of the first call that fails, else MK_SUCCESS, and
// `wrong` says what is wrong with the result.
inline mk_status_t run_exact_call(mk_comm_t comm, ExactCall& call, std::string& wrong) {
  mk_status_t status = call.launch(comm);
  if (status == MK_SUCCESS) status = mk_comm_synchronize(comm, nullptr);
  if (status == MK_SUCCESS) wrong = call.wrong();
  return status;
}

}  // namespace mk::test
