// SPDX-License-Identifier: MIT
// A rank's side of one launch: buffers with poisoned outputs and paddings, the call through the C interface,
// and the comparison with the expected result.
#pragma once

#include <cstddef>
#include <deque>
#include <functional>
#include <string>
#include <vector>

#include "gemm_problem.h"
#include "support/rank_threads.h"

namespace mk::test {

// A slot of RankMemory that any case of gemm_cases.h fits in.
inline constexpr size_t kSlotBytes = 256 << 10;

// Symmetric and registered memory of a rank, cut into slots for launches that are under way together.
class RankMemory {
 public:
  static constexpr int kSlots = 4;

  // Host-collective. False: recorded in the session.
  bool allocate(RankSession& session, size_t slot_bytes);
  bool release(RankSession& session);
  size_t slot_bytes() const { return slot_bytes_; }
  std::byte* symmetric(int slot) { return symmetric_ + static_cast<size_t>(slot) * slot_bytes_; }
  std::byte* registered(int slot) { return registered_.data() + static_cast<size_t>(slot) * slot_bytes_; }

 private:
  size_t slot_bytes_ = 0;
  std::byte* symmetric_ = nullptr;
  std::vector<std::byte> registered_;
  mk_memory_t handle_ = nullptr;
};

// A row-major matrix in memory of its own or given.
struct Matrix {
  mk_dtype_t dtype = MK_DTYPE_BF16;
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t ld = 0;
  std::byte* data = nullptr;
  std::vector<std::byte> own;
  std::string overflow;  // set when a given place is too small
};

class GemmLaunch {
 public:
  GemmLaunch(RankSession& session, const GemmProblem& problem, RankMemory* memory = nullptr, int slot = 0);
  GemmLaunch(const GemmLaunch&) = delete;
  GemmLaunch& operator=(const GemmLaunch&) = delete;

  bool prepare() {
    return session_.ok(try_prepare(session_.comm(), problem_.gemm, problem_.nranks), "prepare");
  }
  bool enqueue() { return session_.ok(try_enqueue(), describe(problem_.gemm)); }
  mk_status_t try_enqueue();
  mk_status_t plan(mk_plan_t* plan);
  // C as before the launch; its inputs are untouched by one.
  void reset_output();
  // After the launch has completed: what is wrong goes to the session.
  void verify();
  std::string result_bits() const;  // of C, without padding

  static mk_status_t try_prepare(mk_comm_t comm, const GemmCase& gemm, int nranks);

 private:
  template <class Arguments>
  void fill(Arguments& args) const;
  template <class Function>
  mk_status_t with_arguments(Function function) const;
  void verify_matrix(const char* name, const Matrix& matrix, const Values& expected, bool exact);

  RankSession& session_;
  const GemmProblem& problem_;
  Matrix a_;
  Matrix b_;
  Matrix c_;
  Matrix bias_;
  Matrix gathered_;
};

// prepare (if asked), enqueue, synchronize, verify.
bool run_launch(RankSession& session, const GemmProblem& problem, RankMemory* memory, bool prepare);

std::deque<GemmProblem> make_problems(const std::vector<GemmCase>& cases, int nranks);
// All problems one after another; prepares before number n when prepare(n), else the call does it.
void run_problems(RankSession& session, const std::deque<GemmProblem>& problems,
                  const std::function<bool(size_t number)>& prepare);

}  // namespace mk::test
