// SPDX-License-Identifier: MIT
#include "attention_launch.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <sstream>
#include <thread>

#include "element.h"

namespace mk::test {
namespace {

constexpr int64_t kGuard = 32;  // elements behind an output

float poison_float() {
  const uint32_t bits = poison(MK_DTYPE_FP32);
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

bool same_bits(float a, float b) { return std::memcmp(&a, &b, sizeof a) == 0; }

}  // namespace

AttentionLaunch::AttentionLaunch(RankSession& session, const AttentionProblem& problem)
    : cu_seqlens(problem.attention.cu_seqlens),
      session_(session),
      problem_(problem),
      positions_(problem.attention.positions(session.nranks(), session.rank())),
      q_(make_buffer(problem.q, false)),
      k_(make_buffer(problem.k, false)),
      v_(make_buffer(problem.v, false)),
      d_o_(make_buffer(problem.d_o, false)),
      forward_o_(make_buffer(problem.o, false)),
      o_(make_buffer(problem.o, true)),
      dq_(make_buffer(problem.dq, true)),
      dk_(make_buffer(problem.dk, true)),
      dv_(make_buffer(problem.dv, true)) {
  const AttentionCase& attention = problem.attention;
  forward_lse_.reserve(1);  // a pointer even for no rows
  for (int64_t batch = 0; batch < attention.batch; ++batch) {
    for (int head = 0; head < attention.heads; ++head) {
      for (const int64_t position : positions_)
        forward_lse_.push_back(static_cast<float>(*problem.lse.row(batch, position, head)));
    }
  }
  lse_.resize(forward_lse_.size() + kGuard);
  restore_inputs();
  poison_outputs();
}

int64_t AttentionLaunch::elements(const Buffer& buffer) const {
  return problem_.attention.batch * static_cast<int64_t>(positions_.size()) * buffer.heads *
         problem_.attention.dim;
}

// An input ends with its last element, so that the address sanitizer sees a read beyond it.
AttentionLaunch::Buffer AttentionLaunch::make_buffer(const Tensor& tensor, bool output) const {
  Buffer buffer;
  buffer.heads = tensor.heads;
  buffer.values = &tensor;
  int64_t count = elements(buffer);
  if (count > 0 && output) count += kGuard;
  // What a rank holds of sequences packed zigzag the call does not know, and so it wants a pointer in any case.
  if (count == 0) count = kGuard;
  buffer.data.resize(static_cast<size_t>(count) * 2);
  return buffer;
}

int64_t AttentionLaunch::place(const Buffer& buffer, int64_t batch, int64_t row, int head) const {
  const auto rows = static_cast<int64_t>(positions_.size());
  const int64_t vector = problem_.attention.layout == MK_ATTENTION_BSHD
                             ? (batch * rows + row) * buffer.heads + head
                             : (batch * buffer.heads + head) * rows + row;
  return vector * problem_.attention.dim;
}

void AttentionLaunch::write(Buffer& buffer) const {
  const AttentionCase& attention = problem_.attention;
  std::fill(buffer.data.begin(), buffer.data.end(), std::byte{0});  // what no row fills
  for (int64_t batch = 0; batch < attention.batch; ++batch) {
    for (size_t row = 0; row < positions_.size(); ++row) {
      for (int head = 0; head < buffer.heads; ++head) {
        const double* values = buffer.values->row(batch, positions_[row], head);
        const int64_t at = place(buffer, batch, static_cast<int64_t>(row), head);
        for (int d = 0; d < attention.dim; ++d)
          write_bits(buffer.data.data(), attention.dtype, at + d, encode_number(values[d], attention.dtype));
      }
    }
  }
}

void AttentionLaunch::poison(Buffer& buffer) const {
  const mk_dtype_t dtype = problem_.attention.dtype;
  for (size_t at = 0; at < buffer.data.size() / 2; ++at)
    write_bits(buffer.data.data(), dtype, static_cast<int64_t>(at), test::poison(dtype));
}

bool AttentionLaunch::poisoned(const Buffer& buffer) const {
  const mk_dtype_t dtype = problem_.attention.dtype;
  for (size_t at = 0; at < buffer.data.size() / 2; ++at) {
    if (read_bits(buffer.data.data(), dtype, static_cast<int64_t>(at)) != test::poison(dtype)) return false;
  }
  return true;
}

void AttentionLaunch::poison_outputs() {
  for (Buffer* buffer : {&o_, &dq_, &dk_, &dv_}) poison(*buffer);
  std::fill(lse_.begin(), lse_.end(), poison_float());
}

bool AttentionLaunch::outputs_untouched() const {
  for (const Buffer* buffer : {&o_, &dq_, &dk_, &dv_}) {
    if (!poisoned(*buffer)) return false;
  }
  return lse_untouched();
}

bool AttentionLaunch::lse_untouched() const {
  return std::all_of(lse_.begin(), lse_.end(), [](float value) { return same_bits(value, poison_float()); });
}

// The caller's inputs are not modified.
void AttentionLaunch::verify_inputs() {
  for (const Buffer* buffer : {&q_, &k_, &v_, &d_o_, &forward_o_}) {
    Buffer expected = make_buffer(*buffer->values, false);
    write(expected);
    if (expected.data != buffer->data) session_.fail(describe(problem_.attention) + ": an input was modified");
  }
}

void AttentionLaunch::poison_inputs() {
  for (Buffer* buffer : {&q_, &k_, &v_, &d_o_, &forward_o_}) poison(*buffer);
}

void AttentionLaunch::restore_inputs() {
  for (Buffer* buffer : {&q_, &k_, &v_, &d_o_, &forward_o_}) write(*buffer);
}

template <class Arguments>
void AttentionLaunch::fill(Arguments& args) const {
  const AttentionCase& attention = problem_.attention;
  args.batch = attention.batch;
  args.seq = attention.seq;
  args.heads = attention.heads;
  args.kv_heads = attention.kv_heads;
  args.dim = attention.dim;
  args.causal = attention.causal;
  args.layout = attention.layout;
  args.dtype = attention.dtype;
  args.softmax_scale = attention.softmax_scale;
  args.num_sequences = attention.num_sequences();
  args.cu_seqlens = cu_seqlens.empty() ? nullptr : cu_seqlens.data();
  args.q = q_.data.data();
  args.k = k_.data.data();
  args.v = v_.data.data();
  args.tuning = &attention.tuning;
}

void AttentionLaunch::fill_forward(mk_ring_attention_args_t& args) const {
  fill(args);
  args.o = o_.data.data();
  args.lse = lse_.data();
  if (change) change(args);
}

mk_status_t AttentionLaunch::try_forward() const {
  mk_ring_attention_args_t args = MK_RING_ATTENTION_ARGS_INIT;
  fill_forward(args);
  return mk_ring_attention(session_.comm(), &args, nullptr);
}

void AttentionLaunch::fill_backward(mk_ring_attention_backward_args_t& args) const {
  fill(args);
  args.o = forward_o_.data.data();
  args.lse = forward_lse_.data();
  args.d_o = d_o_.data.data();
  args.dq = dq_.data.data();
  args.dk = dk_.data.data();
  args.dv = dv_.data.data();
}

mk_status_t AttentionLaunch::try_backward() const {
  mk_ring_attention_backward_args_t args = MK_RING_ATTENTION_BACKWARD_ARGS_INIT;
  fill_backward(args);
  return mk_ring_attention_backward(session_.comm(), &args, nullptr);
}

mk_status_t AttentionLaunch::plan(bool backward, mk_plan_t* plan) const {
  *plan = MK_PLAN_INIT;
  if (backward) {
    mk_ring_attention_backward_args_t args = MK_RING_ATTENTION_BACKWARD_ARGS_INIT;
    fill(args);
    return mk_ring_attention_backward_plan(session_.comm(), &args, plan);
  }
  mk_ring_attention_args_t args = MK_RING_ATTENTION_ARGS_INIT;
  fill(args);
  return mk_ring_attention_plan(session_.comm(), &args, plan);
}

mk_status_t AttentionLaunch::try_prepare(mk_comm_t comm, const AttentionCase& attention, bool backward) {
  mk_ring_attention_maxima_t maxima = MK_RING_ATTENTION_MAXIMA_INIT;
  maxima.batch = attention.batch;
  maxima.seq = attention.seq;
  maxima.heads = attention.heads;
  maxima.kv_heads = attention.kv_heads;
  maxima.dim = attention.dim;
  maxima.num_sequences = attention.num_sequences();
  maxima.dtype = attention.dtype;
  maxima.tuning = &attention.tuning;
  return backward ? mk_ring_attention_backward_prepare(comm, &maxima)
                  : mk_ring_attention_prepare(comm, &maxima);
}

void AttentionLaunch::verify(const char* name, const Buffer& buffer, bool exact, const Tensor* terms) {
  const AttentionCase& attention = problem_.attention;
  std::ostringstream text;
  int64_t wrong = 0;
  double error = 0;
  double norm = 0;
  double terms_norm = 0;
  for (int64_t batch = 0; batch < attention.batch; ++batch) {
    for (size_t row = 0; row < positions_.size(); ++row) {
      for (int head = 0; head < buffer.heads; ++head) {
        const double* expected = buffer.values->row(batch, positions_[row], head);
        const int64_t at = place(buffer, batch, static_cast<int64_t>(row), head);
        for (int d = 0; d < attention.dim; ++d) {
          const double seen = decode(read_bits(buffer.data.data(), attention.dtype, at + d), attention.dtype);
          const double wanted =
              exact ? decode(encode_number(expected[d], attention.dtype), attention.dtype) : expected[d];
          error += (seen - wanted) * (seen - wanted);
          norm += wanted * wanted;
          if (terms != nullptr) {
            const double term = terms->row(batch, positions_[row], head)[d];
            terms_norm += term * term;
          }
          if (seen == wanted || (!exact && std::isfinite(seen))) continue;
          if (wrong++ == 0) {
            text << name << "[batch " << batch << ", position " << positions_[row] << ", head " << head << ", "
                 << d << "] is " << seen << ", expected " << wanted;
          }
        }
      }
    }
  }
  const int64_t count = elements(buffer);
  for (int64_t at = count; at < static_cast<int64_t>(buffer.data.size() / 2); ++at) {
    if (read_bits(buffer.data.data(), attention.dtype, at) != test::poison(attention.dtype) && wrong++ == 0)
      text << name << " is written beyond its end";
  }
  if (wrong > 0)
    session_.fail(describe(attention) + ": " + text.str() + "; " + std::to_string(wrong) + " wrong");
  // Gradients that are zero but for rounding have nothing to be relative to; fp16 has no numbers below 6e-8.
  const bool is_fp16 = attention.dtype == MK_DTYPE_FP16;
  const double floor = (is_fp16 ? 1e-3 : 1e-4) * std::sqrt(static_cast<double>(count));
  const double half_ulp = is_fp16 ? 0x1p-12 : 0x1p-9;
  const double bound =
      std::max(attention.tolerance() * std::max(std::sqrt(norm), floor), half_ulp * std::sqrt(terms_norm));
  if (!exact && !(std::sqrt(error) <= bound))
    session_.fail(describe(attention) + ": " + name + ": relative error " +
                  std::to_string(std::sqrt(error / norm)));
}

void AttentionLaunch::verify_lse() {
  for (size_t at = 0; at < lse_.size(); ++at) {
    if (at >= forward_lse_.size() || positions_.empty()) {
      if (!same_bits(lse_[at], poison_float()))
        session_.fail(describe(problem_.attention) + ": lse is written beyond its end");
      continue;
    }
    const double seen = static_cast<double>(lse_[at]);
    const double wanted = static_cast<double>(forward_lse_[at]);
    if (seen == wanted || std::fabs(seen - wanted) <= 1e-5 * std::max(1.0, std::fabs(wanted))) continue;
    session_.fail(describe(problem_.attention) + ": lse[" + std::to_string(at) + "] is " +
                  std::to_string(seen) + ", expected " + std::to_string(wanted));
  }
}

void AttentionLaunch::verify_forward() {
  verify_inputs();
  verify("o", o_, problem_.exact_outputs());
  if (!change) verify_lse();
}

void AttentionLaunch::verify_backward() {
  verify_inputs();
  const bool rounds = problem_.attention.rounded_factors;
  verify("dq", dq_, problem_.exact_gradients(), rounds ? &problem_.dq_terms : nullptr);
  verify("dk", dk_, problem_.exact_gradients(), rounds ? &problem_.dk_terms : nullptr);
  verify("dv", dv_, problem_.exact_gradients());
}

std::string AttentionLaunch::forward_bits() const {
  std::string bits(reinterpret_cast<const char*>(o_.data.data()), o_.data.size());
  return bits.append(reinterpret_cast<const char*>(lse_.data()), lse_.size() * sizeof(float));
}

std::string AttentionLaunch::backward_bits() const {
  std::string bits;
  for (const Buffer* buffer : {&dq_, &dk_, &dv_})
    bits.append(reinterpret_cast<const char*>(buffer->data.data()), buffer->data.size());
  return bits;
}

bool run_attention(RankSession& session, const AttentionProblem& problem, Direction direction, bool prepare,
                   bool stale) {
  AttentionLaunch launch(session, problem);
  const auto wait = [&] { return session.ok(mk_comm_synchronize(session.comm(), nullptr), "synchronize"); };
  for (const bool backward : {false, true}) {
    if (direction != Direction::both && backward != (direction == Direction::backward)) continue;
    const auto enqueue = [&] { return backward ? launch.backward() : launch.forward(); };
    if (prepare &&
        !session.ok(AttentionLaunch::try_prepare(session.comm(), problem.attention, backward), "prepare"))
      return false;
    if (stale) {  // both banks
      launch.poison_inputs();
      if (!enqueue() || !enqueue() || !wait()) return false;
      launch.restore_inputs();
      launch.poison_outputs();
    }
    if (!enqueue() || !wait()) return false;
    backward ? launch.verify_backward() : launch.verify_forward();
  }
  return true;
}

std::deque<AttentionProblem> make_problems(const std::vector<AttentionCase>& cases) {
  // Most of a test's time goes into what is expected.
  std::vector<std::optional<AttentionProblem>> made(cases.size());
  std::atomic<size_t> next{0};
  std::vector<std::thread> threads;
  for (unsigned i = 0; i < std::max(1U, std::thread::hardware_concurrency()); ++i) {
    threads.emplace_back([&] {
      for (size_t at; (at = next++) < cases.size();) made[at].emplace(cases[at]);
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::deque<AttentionProblem> problems;
  for (std::optional<AttentionProblem>& problem : made) problems.push_back(std::move(*problem));
  return problems;
}

}  // namespace mk::test
