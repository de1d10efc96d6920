// SPDX-License-Identifier: MIT
// A rank's side of an expert layer: buffers with poisoned outputs and paddings, the calls through the C
// interface, and the comparison with the expected results.
#pragma once

#include <cstddef>
#include <deque>
#include <functional>
#include <string>
#include <vector>

#include "moe_matrix.h"
#include "moe_problem.h"
#include "support/rank_threads.h"

namespace mk::test {

class MoeLaunch {
 public:
  MoeLaunch(RankSession& session, const MoeProblem& problem);
  MoeLaunch(const MoeLaunch&) = delete;
  MoeLaunch& operator=(const MoeLaunch&) = delete;

  mk_moe_dispatch_gemm_args_t dispatch_args();
  mk_moe_gemm_combine_args_t combine_args();
  mk_moe_maxima_t maxima() const;

  bool prepare();
  bool enqueue_dispatch(bool use_routing = false);
  bool enqueue_combine();
  bool synchronize();
  void poison_outputs();
  // Moves the record to other memory, the old one overwritten.
  void relocate_record();

  // After the launches have completed: what is wrong goes to the session.
  void verify_dispatch();
  void verify_combine();
  std::string dispatch_bits() const;
  std::string combine_bits() const;

  std::vector<int64_t> topk_idx;  // may be changed before a dispatch
  mk_moe_routing_t* record() { return reinterpret_cast<mk_moe_routing_t*>(record_.data()); }
  size_t record_bytes() const { return record_.size() * sizeof(Line); }

 private:
  void fill();
  void wrong(const std::string& what);
  void verify_record();
  void verify_row(const char* name, const MoeMatrix& matrix, int64_t row, const std::vector<double>& expected);
  void verify_norm(const char* name);

  RankSession& session_;
  const MoeProblem& problem_;
  const int64_t tokens_;
  const int64_t rows_;
  MoeMatrix x_, w_in_, y_, dispatched_, expert_rows_, w_out_, combined_;
  std::vector<int32_t> short_idx_;
  std::vector<float> scale_, weights_;
  struct alignas(16) Line {
    unsigned char bytes[16];
  };
  std::vector<Line> record_;
  double error_ = 0;
  double norm_ = 0;
};

// prepare (if asked), dispatch, combine, verify.
bool run_layer(RankSession& session, const MoeProblem& problem, bool prepare);

std::deque<MoeProblem> make_problems(const std::vector<MoeCase>& cases, int nranks);

}  // namespace mk::test
