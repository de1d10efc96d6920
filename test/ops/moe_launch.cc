// SPDX-License-Identifier: MIT
#include "moe_launch.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <sstream>

#include "element.h"

namespace mk::test {
MoeLaunch::MoeLaunch(RankSession& session, const MoeProblem& problem)
    : session_(session),
      problem_(problem),
      tokens_(problem.moe.tokens_of(session.rank())),
      rows_(problem.rows_of_rank(session.rank())) {
  const MoeCase& moe = problem.moe;
  const int experts = problem.num_experts(session.rank());
  const int64_t capacity = problem.capacity();
  const bool nk = moe.w_layout == MK_LAYOUT_NK;
  x_ = MoeMatrix(moe.dtype, tokens_, moe.hidden, moe.padding, false);
  w_in_ = MoeMatrix(moe.dtype, experts * (nk ? moe.inter : moe.hidden), nk ? moe.hidden : moe.inter, 0, false);
  w_out_ = MoeMatrix(moe.dtype, experts * (nk ? moe.hidden : moe.inter), nk ? moe.inter : moe.hidden, 0, false);
  y_ = MoeMatrix(moe.out_dtype, capacity, moe.inter, moe.padding, true);
  if (moe.dispatched_rows) dispatched_ = MoeMatrix(moe.dtype, capacity, moe.hidden, moe.padding, true);
  expert_rows_ = MoeMatrix(moe.dtype, rows_, moe.inter, moe.padding, false);
  combined_ = MoeMatrix(moe.out_dtype, tokens_, moe.hidden, moe.padding, true);
  const mk_moe_maxima_t sizes = maxima();
  size_t bytes = 0;
  session.ok(mk_moe_routing_bytes(&sizes, session.nranks(), &bytes), "mk_moe_routing_bytes");
  record_.resize(bytes / sizeof(Line));
  std::memset(record_.data(), 0xee, record_bytes());
  fill();
}

void MoeLaunch::fill() {
  const MoeCase& moe = problem_.moe;
  const int rank = session_.rank();
  const bool nk = moe.w_layout == MK_LAYOUT_NK;
  for (int64_t token = 0; token < tokens_; ++token) {
    for (int64_t h = 0; h < moe.hidden; ++h) x_.write(token, h, problem_.x(rank, token, h));
    for (int k = 0; k < moe.topk; ++k) {
      topk_idx.push_back(problem_.expert(rank, token, k));
      if (moe.row_scale) scale_.push_back(static_cast<float>(problem_.scale(rank, token, k)));
      weights_.push_back(static_cast<float>(problem_.weight(rank, token, k)));
    }
  }
  const int first = problem_.first_expert(rank);
  int64_t row = 0;
  for (int local = 0; local < problem_.num_experts(rank); ++local) {
    for (int64_t h = 0; h < moe.hidden; ++h) {
      for (int64_t i = 0; i < moe.inter; ++i) {
        const double in = problem_.w_in(first + local, h, i);
        const double out = problem_.w_out(first + local, i, h);
        nk ? w_in_.write(local * moe.inter + i, h, in) : w_in_.write(local * moe.hidden + h, i, in);
        nk ? w_out_.write(local * moe.hidden + h, i, out) : w_out_.write(local * moe.inter + i, h, out);
      }
    }
    for (const MoeRow& from : problem_.rows(first + local)) {
      for (int64_t i = 0; i < moe.inter; ++i) expert_rows_.write(row, i, problem_.expert_row(from, i));
      ++row;
    }
  }
}

mk_moe_maxima_t MoeLaunch::maxima() const {
  mk_moe_maxima_t sizes = MK_MOE_MAXIMA_INIT;
  for (int rank = 0; rank < session_.nranks(); ++rank)
    sizes.tokens = std::max(sizes.tokens, problem_.moe.tokens_of(rank));
  sizes.capacity_rows = problem_.capacity();
  sizes.hidden = problem_.moe.hidden;
  sizes.inter = problem_.moe.inter;
  sizes.experts = problem_.moe.experts;
  sizes.topk = problem_.moe.topk;
  sizes.dtype = problem_.moe.dtype;
  sizes.out_dtype = problem_.moe.out_dtype;
  sizes.tuning = &problem_.moe.tuning;
  return sizes;
}

mk_moe_dispatch_gemm_args_t MoeLaunch::dispatch_args() {
  const MoeCase& moe = problem_.moe;
  mk_moe_dispatch_gemm_args_t args = MK_MOE_DISPATCH_GEMM_ARGS_INIT;
  args.tokens = tokens_;
  args.hidden = moe.hidden;
  args.inter = moe.inter;
  args.capacity_rows = problem_.capacity();
  args.experts = moe.experts;
  args.topk = moe.topk;
  args.dtype = moe.dtype;
  args.out_dtype = moe.out_dtype;
  args.index_type = moe.index_type;
  args.w_layout = moe.w_layout;
  args.x = x_.data();
  args.ldx = x_.ld();
  short_idx_.assign(topk_idx.begin(), topk_idx.end());
  args.topk_idx =
      moe.index_type == MK_INDEX_INT64 ? static_cast<const void*>(topk_idx.data()) : short_idx_.data();
  args.w = w_in_.data();
  args.y = y_.data();
  args.ldy = y_.ld();
  args.routing = record();
  args.routing_bytes = record_bytes();
  args.dispatched_rows = dispatched_.data();
  args.ld_dispatched_rows = dispatched_.ld();
  args.row_scale = moe.row_scale ? scale_.data() : nullptr;
  args.tuning = &moe.tuning;
  return args;
}

mk_moe_gemm_combine_args_t MoeLaunch::combine_args() {
  const MoeCase& moe = problem_.moe;
  mk_moe_gemm_combine_args_t args = MK_MOE_GEMM_COMBINE_ARGS_INIT;
  args.tokens = tokens_;
  args.hidden = moe.hidden;
  args.inter = moe.inter;
  args.experts = moe.experts;
  args.topk = moe.topk;
  args.dtype = moe.dtype;
  args.out_dtype = moe.out_dtype;
  args.w_layout = moe.w_layout;
  args.rows = expert_rows_.data();
  args.ld_rows = expert_rows_.ld();
  args.w = w_out_.data();
  args.routing = record();
  args.routing_bytes = record_bytes();
  args.topk_weights = weights_.data();
  args.y = combined_.data();
  args.ldy = combined_.ld();
  args.tuning = &moe.tuning;
  return args;
}

bool MoeLaunch::prepare() {
  const mk_moe_maxima_t sizes = maxima();
  return session_.ok(mk_moe_dispatch_gemm_prepare(session_.comm(), &sizes), "mk_moe_dispatch_gemm_prepare");
}

bool MoeLaunch::enqueue_dispatch(bool use_routing) {
  mk_moe_dispatch_gemm_args_t args = dispatch_args();
  if (use_routing) args.use_routing = 1, args.topk_idx = nullptr;
  return session_.ok(mk_moe_dispatch_gemm(session_.comm(), &args, nullptr),
                     "dispatch " + describe(problem_.moe));
}

bool MoeLaunch::enqueue_combine() {
  const mk_moe_gemm_combine_args_t args = combine_args();
  return session_.ok(mk_moe_gemm_combine(session_.comm(), &args, nullptr), "combine " + describe(problem_.moe));
}

bool MoeLaunch::synchronize() {
  return session_.ok(mk_comm_synchronize(session_.comm(), nullptr),
                     "mk_comm_synchronize, " + describe(problem_.moe));
}

void MoeLaunch::poison_outputs() {
  y_.poison();
  if (problem_.moe.dispatched_rows) dispatched_.poison();
  combined_.poison();
}

void MoeLaunch::relocate_record() {
  std::vector<Line> moved = record_;
  std::memset(record_.data(), 0x77, record_bytes());
  record_.swap(moved);
}

void MoeLaunch::wrong(const std::string& what) { session_.fail(describe(problem_.moe) + ": " + what); }

void MoeLaunch::verify_record() {
  const mk_moe_routing_t& head = *record();
  const int experts = problem_.num_experts(session_.rank());
  if (head.status != MK_SUCCESS || head.num_local_experts != experts || head.tokens != tokens_ ||
      head.num_rows != rows_ || head.needed_rows != rows_) {
    std::ostringstream text;
    text << "record: status " << head.status << ", experts " << head.num_local_experts << ", tokens "
         << head.tokens << ", rows " << head.num_rows << ", needed " << head.needed_rows << "; expected "
         << experts << " experts, " << tokens_ << " tokens, " << rows_ << " rows";
    return wrong(text.str());
  }
  const char* base = reinterpret_cast<const char*>(&head);
  const auto* counts = reinterpret_cast<const int32_t*>(base + head.expert_counts_offset);
  const auto* offsets = reinterpret_cast<const int32_t*>(base + head.expert_offsets_offset);
  const auto* rows = reinterpret_cast<const mk_moe_row_t*>(base + head.rows_offset);
  int32_t row = 0;
  for (int local = 0; local < experts; ++local) {
    const auto& expected = problem_.rows(problem_.first_expert(session_.rank()) + local);
    if (offsets[local] != row || counts[local] != static_cast<int32_t>(expected.size()))
      return wrong("record: counts or offsets of expert " + std::to_string(local));
    for (const MoeRow& from : expected) {
      const mk_moe_row_t& seen = rows[row++];
      if (seen.rank != from.rank || seen.token != from.token || seen.k != from.k)
        return wrong("record: row " + std::to_string(row - 1));
    }
  }
  if (offsets[experts] != row) wrong("record: the last offset");
}

void MoeLaunch::verify_row(const char* name, const MoeMatrix& matrix, int64_t row,
                           const std::vector<double>& expected) {
  for (size_t column = 0; column < expected.size(); ++column) {
    const double seen = matrix.read(row, static_cast<int64_t>(column));
    const double difference = seen - expected[column];
    error_ += difference * difference;
    norm_ += expected[column] * expected[column];
    if (problem_.moe.integers ? seen == expected[column] : !std::isnan(seen)) continue;
    std::ostringstream text;
    text << name << "[" << row << "," << column << "] is " << seen << ", expected " << expected[column];
    return wrong(text.str());
  }
}

void MoeLaunch::verify_norm(const char* name) {
  if (!problem_.moe.integers && !(std::sqrt(error_) <= problem_.moe.tolerance() * std::sqrt(norm_)))
    wrong(std::string(name) + ": relative error " + std::to_string(std::sqrt(error_ / norm_)));
  error_ = norm_ = 0;
}

void MoeLaunch::verify_dispatch() {
  verify_record();
  const int first = problem_.first_expert(session_.rank());
  int64_t row = 0;
  for (int local = 0; local < problem_.num_experts(session_.rank()); ++local) {
    for (const MoeRow& from : problem_.rows(first + local)) {
      verify_row("y", y_, row, problem_.dispatched(first + local, from));
      for (int64_t h = 0; problem_.moe.dispatched_rows && h < problem_.moe.hidden; ++h) {
        if (dispatched_.read(row, h) == problem_.x(from.rank, from.token, h)) continue;
        wrong("dispatched row " + std::to_string(row));
        break;
      }
      ++row;
    }
  }
  verify_norm("y");
  for (const MoeMatrix* matrix : {&y_, &dispatched_}) {
    if (const std::string text = matrix->overwritten(rows_); !text.empty()) wrong("dispatch: " + text);
  }
}

void MoeLaunch::verify_combine() {
  for (int64_t token = 0; token < tokens_; ++token)
    verify_row("combined y", combined_, token, problem_.combined(session_.rank(), token));
  verify_norm("combined y");
  if (const std::string text = combined_.overwritten(tokens_); !text.empty()) wrong("combine: " + text);
}

std::string MoeLaunch::dispatch_bits() const { return y_.bits(rows_); }
std::string MoeLaunch::combine_bits() const { return combined_.bits(tokens_); }

bool run_layer(RankSession& session, const MoeProblem& problem, bool prepare) {
  MoeLaunch launch(session, problem);
  // What was prepared for narrower outputs covers a dispatch, and then not the combine.
  const bool wide = problem.moe.out_dtype == MK_DTYPE_FP32;
  if ((prepare || wide) && !launch.prepare()) return false;
  if (!launch.enqueue_dispatch() || !launch.enqueue_combine() || !launch.synchronize()) return false;
  launch.verify_dispatch();
  launch.verify_combine();
  return true;
}

std::deque<MoeProblem> make_problems(const std::vector<MoeCase>& cases, int nranks) {
  std::deque<MoeProblem> problems;
  for (const MoeCase& moe : cases) problems.emplace_back(moe, nranks);
  return problems;
}

}  // namespace mk::test
