// SPDX-License-Identifier: MIT
// A rank's side of one ring attention, forward and backward: its slices, poisoned outputs, the calls through
// the C interface, the comparison with the expected results.
#pragma once

#include <cstddef>
#include <deque>
#include <functional>
#include <string>
#include <vector>

#include "attention_problem.h"
#include "support/rank_threads.h"

namespace mk::test {

class AttentionLaunch {
 public:
  AttentionLaunch(RankSession& session, const AttentionProblem& problem);

  // The forward call's arguments, `change` applied.
  void fill_forward(mk_ring_attention_args_t& args) const;
  void fill_backward(mk_ring_attention_backward_args_t& args) const;
  mk_status_t try_forward() const;
  mk_status_t try_backward() const;
  bool forward() const { return session_.ok(try_forward(), "mk_ring_attention"); }
  bool backward() const { return session_.ok(try_backward(), "mk_ring_attention_backward"); }
  mk_status_t plan(bool backward, mk_plan_t* plan) const;
  void poison_outputs();
  // Fills what other ranks see of this one with NaN, and back.
  void poison_inputs();
  void restore_inputs();
  // After the launch has completed: what is wrong goes to the session.
  void verify_forward();
  void verify_backward();
  bool outputs_untouched() const;
  bool lse_untouched() const;
  std::string forward_bits() const;
  std::string backward_bits() const;

  // What a test spoils on purpose.
  std::vector<int32_t> cu_seqlens;
  std::function<void(mk_ring_attention_args_t&)> change;

  static mk_status_t try_prepare(mk_comm_t comm, const AttentionCase& attention, bool backward);

 private:
  // A tensor's rows of this rank in the caller's layout.
  struct Buffer {
    int heads = 0;
    std::vector<std::byte> data;
    const Tensor* values = nullptr;
  };

  Buffer make_buffer(const Tensor& tensor, bool output) const;
  void write(Buffer& buffer) const;
  int64_t place(const Buffer& buffer, int64_t batch, int64_t row, int head) const;
  int64_t elements(const Buffer& buffer) const;
  void poison(Buffer& buffer) const;
  bool poisoned(const Buffer& buffer) const;
  void verify(const char* name, const Buffer& buffer, bool exact, const Tensor* terms = nullptr);
  void verify_lse();
  void verify_inputs();
  template <class Arguments>
  void fill(Arguments& args) const;

  RankSession& session_;
  const AttentionProblem& problem_;
  const std::vector<int64_t> positions_;
  Buffer q_, k_, v_, d_o_, forward_o_;
  std::vector<float> forward_lse_;
  mutable Buffer o_, dq_, dk_, dv_;
  mutable std::vector<float> lse_;
};

enum class Direction { forward, backward, both };

// Launches with NaN inputs first when `stale` (so that receive areas hold NaN), then enqueues, waits, verifies.
bool run_attention(RankSession& session, const AttentionProblem& problem, Direction direction, bool prepare,
                   bool stale);

std::deque<AttentionProblem> make_problems(const std::vector<AttentionCase>& cases);

// The corners one by one, and case number `index` of an endless series that mixes everything.
std::vector<AttentionCase> attention_corner_cases(int nranks);
AttentionCase mixed_attention_case(uint64_t seed, uint64_t index, int nranks);

// node_of_rank of jobs of 1 to 8 ranks on 1 to 3 nodes, even and uneven.
const std::vector<std::vector<int32_t>>& attention_layouts();

}  // namespace mk::test
