// SPDX-License-Identifier: MIT
// A rank's side of an expert layer on its GPU: inputs and expected results from the loops of test/ops, outputs
// poisoned before each launch and compared whole.
#pragma once

#include <cstring>
#include <deque>
#include <string>
#include <vector>

#include "operators_run.h"
#include "test/ops/moe_matrix.h"
#include "test/ops/moe_problem.h"

namespace operators {

using mk::test::MoeCase;
using mk::test::MoeMatrix;
using mk::test::MoeProblem;
using mk::test::MoeRow;

// A matrix here and its copy on the device.
struct MoeBuffer {
  MoeMatrix host;
  Buffer device;
  MoeBuffer(mk_dtype_t dtype, int64_t rows, int64_t columns, int padding, bool is_output)
      : host(dtype, rows, columns, padding, is_output), device(host.num_bytes()) {}
  void upload(cudaStream_t stream) {
    if (host.num_bytes() == 0) return;
    require_cuda(cudaMemcpyAsync(device.data, host.data(), host.num_bytes(), cudaMemcpyHostToDevice, stream),
                 "cudaMemcpyAsync");
  }
  void download(cudaStream_t stream) {
    if (host.num_bytes() == 0) return;
    require_cuda(cudaMemcpyAsync(host.data(), device.data, host.num_bytes(), cudaMemcpyDeviceToHost, stream),
                 "cudaMemcpyAsync");
  }
  void poison(cudaStream_t stream) {
    host.poison();
    upload(stream);
  }
};

class MoeLayer {
 public:
  // Buffers for problems of the same sizes as this one, and of up to `capacity` rows a rank.
  MoeLayer(const Rank& rank, mk_comm_t comm, int nranks, const MoeProblem& problem, int64_t capacity);

  mk_moe_maxima_t maxima() const;
  mk_moe_dispatch_gemm_args_t dispatch_args() const;
  mk_moe_gemm_combine_args_t combine_args() const;
  // Brings a problem's inputs to the device. Waits.
  void load(const MoeProblem& problem);
  void load_indices(const std::vector<int64_t>& topk_idx);
  void poison();  // of outputs
  void fill_record(int byte);

  mk_status_t dispatch(bool use_routing = false) const;
  mk_status_t combine() const;
  // After launches of the problem that was loaded last, once the stream is empty: "" or what is wrong.
  std::string wrong_dispatch();
  std::string wrong_combine();
  std::string untouched_outputs();
  std::string dispatch_bits();
  std::string combine_bits();
  mk_moe_routing_t head();
  std::vector<int64_t> topk_idx() const;

 private:
  int64_t tokens() const { return problem_->moe.tokens_of(index_); }
  int64_t rows() const { return problem_->rows_of_rank(index_); }
  void download();
  std::string wrong_record(const std::vector<std::byte>& bytes) const;
  std::string wrong_row(const char* name, const MoeMatrix& matrix, int64_t row,
                        const std::vector<double>& expected);
  std::string wrong_norm(const char* name);

  const Rank& rank_;
  const mk_comm_t comm_;
  const int nranks_;
  const int index_;  // of this rank in comm
  const MoeProblem* problem_;
  const MoeCase moe_;
  const int64_t capacity_;
  size_t record_bytes_ = 0;
  MoeBuffer x_, w_in_, y_, dispatched_, expert_rows_, w_out_, combined_;
  Buffer indices_, scale_, weights_, record_;
  double error_ = 0, norm_ = 0;
};

constexpr int STAGE_SECONDS = 90;

// Small ones, of all types and layouts, evenly and unevenly spread.
std::vector<MoeCase> common_cases();
std::deque<MoeProblem> make_problems(const std::vector<MoeCase>& cases, int nranks);
// `wrong`: "" or what is wrong.
void check(Tally& tally, const Rank& rank, const MoeProblem& problem, const char* what,
           const std::string& wrong);
// After a launch that must have failed: MK_ERROR_DATA that blames `guilty` and says `says`, which is then
// cleared.
void expect_data_error(Tally& tally, const Rank& rank, int guilty, const std::string& says);
void expect_nothing(Tally& tally, const Rank& rank, MoeLayer& layer, int64_t needed_rows);
// Dispatches of a layer of 6 tokens or more a rank, 7 experts and a topk of 3 with wide indices.
void run_bad_indices(Tally& tally, Rank& rank, MoeLayer& layer, Watchdog& watchdog);
// A combine for which the last rank passes the record of another dispatch than the others: two layers of the
// same sizes and other tokens.
void run_mixed_records(Tally& tally, Rank& rank, const MoeLayer& layer, const MoeLayer& other,
                       Watchdog& watchdog);

}  // namespace operators
