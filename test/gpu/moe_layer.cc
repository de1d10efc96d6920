// SPDX-License-Identifier: MIT
#include "moe_layer.h"

#include <cmath>

namespace operators {
namespace {

int64_t experts_of(const MoeProblem& problem, int rank) { return problem.num_experts(rank); }

mk_moe_maxima_t maxima_of(const MoeProblem& problem, int64_t capacity) {
  const MoeCase& moe = problem.moe;
  mk_moe_maxima_t sizes = MK_MOE_MAXIMA_INIT;
  for (int rank = 0; rank < problem.nranks; ++rank) sizes.tokens = std::max(sizes.tokens, moe.tokens_of(rank));
  sizes.capacity_rows = capacity;
  sizes.hidden = moe.hidden;
  sizes.inter = moe.inter;
  sizes.experts = moe.experts;
  sizes.topk = moe.topk;
  sizes.dtype = moe.dtype;
  sizes.out_dtype = moe.out_dtype;
  return sizes;
}

size_t record_bytes_of(const mk_moe_maxima_t& maxima, int nranks) {
  size_t bytes = 0;
  require(mk_moe_routing_bytes(&maxima, nranks, &bytes), "mk_moe_routing_bytes", nullptr);
  return bytes;
}

}  // namespace

MoeLayer::MoeLayer(const Rank& rank, mk_comm_t comm, int nranks, const MoeProblem& problem, int64_t capacity)
    : rank_(rank),
      comm_(comm),
      nranks_(nranks),
      index_(nranks == 1 ? 0 : rank.rank),
      problem_(&problem),
      moe_(problem.moe),
      capacity_(capacity),
      record_bytes_(record_bytes_of(maxima_of(problem, capacity), nranks)),
      x_(moe_.dtype, tokens(), moe_.hidden, moe_.padding, false),
      w_in_(moe_.dtype,
            experts_of(problem, index_) * (moe_.w_layout == MK_LAYOUT_NK ? moe_.inter : moe_.hidden),
            moe_.w_layout == MK_LAYOUT_NK ? moe_.hidden : moe_.inter, 0, false),
      y_(moe_.out_dtype, capacity, moe_.inter, moe_.padding, true),
      dispatched_(moe_.dtype, moe_.dispatched_rows ? capacity : 0, moe_.hidden, moe_.padding, true),
      expert_rows_(moe_.dtype, capacity, moe_.inter, moe_.padding, false),
      w_out_(moe_.dtype,
             experts_of(problem, index_) * (moe_.w_layout == MK_LAYOUT_NK ? moe_.hidden : moe_.inter),
             moe_.w_layout == MK_LAYOUT_NK ? moe_.inter : moe_.hidden, 0, false),
      combined_(moe_.out_dtype, tokens(), moe_.hidden, moe_.padding, true),
      indices_(static_cast<size_t>(tokens() * moe_.topk) * 8),
      scale_(static_cast<size_t>(tokens() * moe_.topk) * 4),
      weights_(static_cast<size_t>(tokens() * moe_.topk) * 4),
      record_(record_bytes_) {
  fill_record(0xee);
  load(problem);
}

mk_moe_maxima_t MoeLayer::maxima() const {
  mk_moe_maxima_t sizes = maxima_of(*problem_, capacity_);
  sizes.tuning = &moe_.tuning;
  return sizes;
}

mk_moe_dispatch_gemm_args_t MoeLayer::dispatch_args() const {
  mk_moe_dispatch_gemm_args_t args = MK_MOE_DISPATCH_GEMM_ARGS_INIT;
  args.tokens = tokens();
  args.hidden = moe_.hidden;
  args.inter = moe_.inter;
  args.capacity_rows = capacity_;
  args.experts = moe_.experts;
  args.topk = moe_.topk;
  args.dtype = moe_.dtype;
  args.out_dtype = moe_.out_dtype;
  args.index_type = moe_.index_type;
  args.w_layout = moe_.w_layout;
  args.x = x_.device.data;
  args.ldx = x_.host.ld();
  args.topk_idx = indices_.data;
  args.w = w_in_.device.data;
  args.y = y_.device.data;
  args.ldy = y_.host.ld();
  args.routing = static_cast<mk_moe_routing_t*>(record_.data);
  args.routing_bytes = record_bytes_;
  args.dispatched_rows = moe_.dispatched_rows ? dispatched_.device.data : nullptr;
  args.ld_dispatched_rows = dispatched_.host.ld();
  args.row_scale = moe_.row_scale ? static_cast<const float*>(scale_.data) : nullptr;
  args.tuning = &moe_.tuning;
  return args;
}

mk_moe_gemm_combine_args_t MoeLayer::combine_args() const {
  mk_moe_gemm_combine_args_t args = MK_MOE_GEMM_COMBINE_ARGS_INIT;
  args.tokens = tokens();
  args.hidden = moe_.hidden;
  args.inter = moe_.inter;
  args.experts = moe_.experts;
  args.topk = moe_.topk;
  args.dtype = moe_.dtype;
  args.out_dtype = moe_.out_dtype;
  args.w_layout = moe_.w_layout;
  args.rows = rows() > 0 ? expert_rows_.device.data : nullptr;
  args.ld_rows = expert_rows_.host.ld();
  args.w = w_out_.device.data;
  args.routing = static_cast<const mk_moe_routing_t*>(record_.data);
  args.routing_bytes = record_bytes_;
  args.topk_weights = static_cast<const float*>(weights_.data);
  args.y = combined_.device.data;
  args.ldy = combined_.host.ld();
  args.tuning = &moe_.tuning;
  return args;
}

std::vector<int64_t> MoeLayer::topk_idx() const {
  std::vector<int64_t> all;
  for (int64_t token = 0; token < tokens(); ++token) {
    for (int k = 0; k < moe_.topk; ++k) all.push_back(problem_->expert(index_, token, k));
  }
  return all;
}

void MoeLayer::load_indices(const std::vector<int64_t>& topk_idx) {
  const std::vector<int32_t> narrow(topk_idx.begin(), topk_idx.end());
  const bool is_wide = moe_.index_type == MK_INDEX_INT64;
  const void* from = is_wide ? static_cast<const void*>(topk_idx.data()) : narrow.data();
  const size_t bytes = topk_idx.size() * (is_wide ? 8 : 4);
  require_cuda(cudaMemcpyAsync(indices_.data, from, bytes, cudaMemcpyHostToDevice, rank_.stream),
               "cudaMemcpyAsync");
  require_cuda(cudaStreamSynchronize(rank_.stream), "topk_idx");
}

void MoeLayer::load(const MoeProblem& problem) {
  problem_ = &problem;
  const bool nk = moe_.w_layout == MK_LAYOUT_NK;
  std::vector<float> scale, weights;
  for (int64_t token = 0; token < tokens(); ++token) {
    for (int64_t h = 0; h < moe_.hidden; ++h) x_.host.write(token, h, problem.x(index_, token, h));
    for (int k = 0; k < moe_.topk; ++k) {
      scale.push_back(static_cast<float>(problem.scale(index_, token, k)));
      weights.push_back(static_cast<float>(problem.weight(index_, token, k)));
    }
  }
  const int first = problem.first_expert(index_);
  int64_t row = 0;
  expert_rows_.host.poison();
  for (int local = 0; local < problem.num_experts(index_); ++local) {
    for (int64_t h = 0; h < moe_.hidden; ++h) {
      for (int64_t i = 0; i < moe_.inter; ++i) {
        const double in = problem.w_in(first + local, h, i);
        const double out = problem.w_out(first + local, i, h);
        nk ? w_in_.host.write(local * moe_.inter + i, h, in) : w_in_.host.write(local * moe_.hidden + h, i, in);
        nk ? w_out_.host.write(local * moe_.hidden + h, i, out)
           : w_out_.host.write(local * moe_.inter + i, h, out);
      }
    }
    for (const MoeRow& from : problem.rows(first + local)) {
      for (int64_t i = 0; i < moe_.inter; ++i) expert_rows_.host.write(row, i, problem.expert_row(from, i));
      ++row;
    }
  }
  for (MoeBuffer* buffer : {&x_, &w_in_, &w_out_, &expert_rows_}) buffer->upload(rank_.stream);
  require_cuda(
      cudaMemcpyAsync(scale_.data, scale.data(), scale.size() * 4, cudaMemcpyHostToDevice, rank_.stream),
      "row_scale");
  require_cuda(
      cudaMemcpyAsync(weights_.data, weights.data(), weights.size() * 4, cudaMemcpyHostToDevice, rank_.stream),
      "topk_weights");
  load_indices(topk_idx());
}

void MoeLayer::poison() {
  for (MoeBuffer* buffer : {&y_, &dispatched_, &combined_}) buffer->poison(rank_.stream);
  require_cuda(cudaStreamSynchronize(rank_.stream), "poisoning");
}

void MoeLayer::fill_record(int byte) {
  require_cuda(cudaMemsetAsync(record_.data, byte, record_.bytes, rank_.stream), "cudaMemsetAsync");
  require_cuda(cudaStreamSynchronize(rank_.stream), "cudaMemsetAsync");
}

mk_status_t MoeLayer::dispatch(bool use_routing) const {
  mk_moe_dispatch_gemm_args_t args = dispatch_args();
  if (use_routing) args.use_routing = 1, args.topk_idx = nullptr;
  return mk_moe_dispatch_gemm(comm_, &args, rank_.stream);
}

mk_status_t MoeLayer::combine() const {
  const mk_moe_gemm_combine_args_t args = combine_args();
  return mk_moe_gemm_combine(comm_, &args, rank_.stream);
}

void MoeLayer::download() {
  for (MoeBuffer* buffer : {&y_, &dispatched_, &combined_}) buffer->download(rank_.stream);
  require_cuda(cudaStreamSynchronize(rank_.stream), "downloading");
}

mk_moe_routing_t MoeLayer::head() {
  mk_moe_routing_t head{};
  require_cuda(cudaMemcpyAsync(&head, record_.data, sizeof head, cudaMemcpyDeviceToHost, rank_.stream),
               "the record");
  require_cuda(cudaStreamSynchronize(rank_.stream), "the record");
  return head;
}

std::string MoeLayer::wrong_record(const std::vector<std::byte>& bytes) const {
  mk_moe_routing_t head;
  std::memcpy(&head, bytes.data(), sizeof head);
  const int experts = problem_->num_experts(index_);
  if (head.status != MK_SUCCESS || head.num_local_experts != experts || head.tokens != tokens() ||
      head.num_rows != rows() || head.needed_rows != rows()) {
    return text("record: status %d, experts %d, tokens %lld, rows %lld, needed %lld; expected %d, %lld, %lld",
                head.status, head.num_local_experts, static_cast<long long>(head.tokens),
                static_cast<long long>(head.num_rows), static_cast<long long>(head.needed_rows), experts,
                static_cast<long long>(tokens()), static_cast<long long>(rows()));
  }
  const auto* counts = reinterpret_cast<const int32_t*>(bytes.data() + head.expert_counts_offset);
  const auto* offsets = reinterpret_cast<const int32_t*>(bytes.data() + head.expert_offsets_offset);
  const auto* seen = reinterpret_cast<const mk_moe_row_t*>(bytes.data() + head.rows_offset);
  int32_t row = 0;
  for (int local = 0; local < experts; ++local) {
    const auto& expected = problem_->rows(problem_->first_expert(index_) + local);
    if (offsets[local] != row || counts[local] != static_cast<int32_t>(expected.size()))
      return text("record: expert %d has %d rows from %d on, expected %zu from %d on", local, counts[local],
                  offsets[local], expected.size(), row);
    for (const MoeRow& from : expected) {
      const mk_moe_row_t& its = seen[row++];
      if (its.rank != from.rank || its.token != from.token || its.k != from.k)
        return text("record: row %d is of rank %d, token %d, k %d; expected %d, %lld, %d", row - 1, its.rank,
                    its.token, its.k, from.rank, static_cast<long long>(from.token), from.k);
    }
  }
  return offsets[experts] == row ? "" : "record: the last offset";
}

std::string MoeLayer::wrong_row(const char* name, const MoeMatrix& matrix, int64_t row,
                                const std::vector<double>& expected) {
  for (size_t column = 0; column < expected.size(); ++column) {
    const double seen = matrix.read(row, static_cast<int64_t>(column));
    error_ += (seen - expected[column]) * (seen - expected[column]);
    norm_ += expected[column] * expected[column];
    if (moe_.integers ? seen == expected[column] : !std::isnan(seen)) continue;
    return text("%s[%lld, %zu] is %g, expected %g", name, static_cast<long long>(row), column, seen,
                expected[column]);
  }
  return "";
}

std::string MoeLayer::wrong_norm(const char* name) {
  const double error = std::sqrt(error_), norm = std::sqrt(norm_);
  error_ = norm_ = 0;
  if (moe_.integers || error <= moe_.tolerance() * norm) return "";
  return text("%s: relative error %g", name, error / norm);
}

std::string MoeLayer::wrong_dispatch() {
  download();
  std::vector<std::byte> record(record_bytes_);
  require_cuda(cudaMemcpy(record.data(), record_.data, record_bytes_, cudaMemcpyDeviceToHost), "the record");
  std::string wrong = wrong_record(record);
  const int first = problem_->first_expert(index_);
  int64_t row = 0;
  for (int local = 0; local < problem_->num_experts(index_); ++local) {
    for (const MoeRow& from : problem_->rows(first + local)) {
      if (wrong.empty()) wrong = wrong_row("y", y_.host, row, problem_->dispatched(first + local, from));
      for (int64_t h = 0; moe_.dispatched_rows && wrong.empty() && h < moe_.hidden; ++h) {
        if (dispatched_.host.read(row, h) != problem_->x(from.rank, from.token, h))
          wrong = text("dispatched_rows[%lld, %lld]", static_cast<long long>(row), static_cast<long long>(h));
      }
      ++row;
    }
  }
  const std::string norm = wrong_norm("y");
  if (wrong.empty()) wrong = norm;
  for (const MoeBuffer* buffer : {&y_, &dispatched_}) {
    if (wrong.empty()) wrong = buffer->host.overwritten(rows());
  }
  return wrong;
}

std::string MoeLayer::wrong_combine() {
  download();
  std::string wrong;
  for (int64_t token = 0; token < tokens() && wrong.empty(); ++token)
    wrong = wrong_row("combined y", combined_.host, token, problem_->combined(index_, token));
  const std::string norm = wrong_norm("combined y");
  if (wrong.empty()) wrong = norm;
  return wrong.empty() ? combined_.host.overwritten(tokens()) : wrong;
}

std::string MoeLayer::untouched_outputs() {
  download();
  for (const MoeBuffer* buffer : {&y_, &dispatched_, &combined_}) {
    if (const std::string wrong = buffer->host.overwritten(0); !wrong.empty()) return wrong;
  }
  return "";
}

std::string MoeLayer::dispatch_bits() {
  download();
  return y_.host.bits(rows());
}

std::string MoeLayer::combine_bits() {
  download();
  return combined_.host.bits(tokens());
}

std::vector<MoeCase> common_cases() {
  std::vector<MoeCase> cases;
  const auto add = [&](const MoeCase& moe) { cases.push_back(moe); };
  add({});
  add({.same_tokens = true, .hidden = 8, .experts = 1, .topk = 1});
  add({.tokens = 60,
       .hidden = 136,
       .inter = 264,
       .experts = 12,
       .topk = 5,
       .dtype = MK_DTYPE_FP16,
       .out_dtype = MK_DTYPE_FP16,
       .w_layout = MK_LAYOUT_NK,
       .index_type = MK_INDEX_INT64,
       .row_scale = true,
       .dispatched_rows = true,
       .spare_rows = 7,
       .padding = 2,
       .seed = 3});
  add({.tokens = 33,
       .hidden = 64,
       .inter = 72,
       .experts = 64,
       .topk = 16,
       .out_dtype = MK_DTYPE_FP32,
       .seed = 4});
  using mk::test::Spread;
  for (const Spread spread : {Spread::one_expert, Spread::few, Spread::half, Spread::nowhere}) {
    add({.tokens = 150,
         .hidden = 64,
         .inter = 136,
         .experts = 10,
         .topk = 3,
         .spread = spread,
         .row_scale = true,
         .dispatched_rows = true,
         .seed = 5});
  }
  return cases;
}

std::deque<MoeProblem> make_problems(const std::vector<MoeCase>& cases, int nranks) {
  std::deque<MoeProblem> problems;
  for (const MoeCase& moe : cases) problems.emplace_back(moe, nranks);
  return problems;
}

void check(Tally& tally, const Rank& rank, const MoeProblem& problem, const char* what,
           const std::string& wrong) {
  tally.check(wrong.empty(), text("rank %d of %d: %s: %s: %s", rank.rank, problem.nranks, what,
                                  describe(problem.moe).c_str(), wrong.c_str()));
}

void expect_data_error(Tally& tally, const Rank& rank, int guilty, const std::string& says) {
  const mk_status_t seen = mk_comm_synchronize(rank.comm, rank.stream);
  const std::string sentence = mk_get_last_error(rank.comm);
  tally.check(seen == MK_ERROR_DATA && sentence.find(says) != std::string::npos &&
                  sentence.find("no rows were moved") != std::string::npos,
              text("rank %d: expected a data error that says \"%s\", saw %s: %s", rank.rank, says.c_str(),
                   mk_status_string(seen), sentence.c_str()));
  mk_async_error_t error = MK_ASYNC_ERROR_INIT;
  require(mk_comm_get_async_error(rank.comm, &error), "mk_comm_get_async_error", rank.comm);
  tally.check(error.status == MK_ERROR_DATA && (guilty < 0 || error.rank == guilty),
              text("rank %d: the error is %d of rank %d, expected of rank %d", rank.rank, error.status,
                   error.rank, guilty));
  require(mk_comm_clear_async_error(rank.comm), "mk_comm_clear_async_error", rank.comm);
}

void expect_nothing(Tally& tally, const Rank& rank, MoeLayer& layer, int64_t needed_rows) {
  const mk_moe_routing_t head = layer.head();
  tally.check(head.status == MK_ERROR_DATA && head.num_rows == 0 && head.needed_rows == needed_rows,
              text("rank %d: record: status %d, rows %lld, needed %lld; expected %lld", rank.rank, head.status,
                   static_cast<long long>(head.num_rows), static_cast<long long>(head.needed_rows),
                   static_cast<long long>(needed_rows)));
  const std::string wrong = layer.untouched_outputs();
  tally.check(wrong.empty(), text("rank %d: after an error: %s", rank.rank, wrong.c_str()));
}

void run_bad_indices(Tally& tally, Rank& rank, MoeLayer& layer, Watchdog& watchdog) {
  struct Bad {
    std::vector<int64_t> row;
    std::string says;
  };
  const Bad all[] = {{{1, 7, 2}, "topk_idx[4, 1]: expected -1 to 6, saw 7"},
                     {{-2, 1, 2}, "topk_idx[4, 0]: expected -1 to 6, saw -2"},
                     {{3, 1, 3}, "topk_idx[4, 2]: expected each expert once in a row, saw 3 again"},
                     {{0, 1, int64_t{1} << 32}, "topk_idx[4, 2]: expected -1 to 6, saw 4294967296"}};
  const int guilty = rank.nranks - 1;
  for (const Bad& bad : all) {
    watchdog.stage(rank.rank, bad.says, STAGE_SECONDS, rank.comm);
    std::vector<int64_t> indices = layer.topk_idx();
    if (rank.rank == guilty) {
      std::copy(bad.row.begin(), bad.row.end(), indices.begin() + 4 * 3);
      indices[5 * 3] = 1000;  // a later one
    }
    layer.load_indices(indices);
    layer.poison();
    rank.meet();
    require(layer.dispatch(), "mk_moe_dispatch_gemm", rank.comm);
    expect_data_error(tally, rank, guilty, bad.says);
    expect_nothing(tally, rank, layer, 0);
    rank.meet();
  }
  layer.load_indices(layer.topk_idx());
}

void run_mixed_records(Tally& tally, Rank& rank, const MoeLayer& layer, const MoeLayer& other,
                       Watchdog& watchdog) {
  watchdog.stage(rank.rank, "records of two dispatches", STAGE_SECONDS, rank.comm);
  require(layer.dispatch(), "mk_moe_dispatch_gemm", rank.comm);
  require(other.dispatch(), "mk_moe_dispatch_gemm", rank.comm);
  rank.synchronize();
  mk_moe_gemm_combine_args_t combine = layer.combine_args();
  if (rank.rank == rank.nranks - 1) combine.routing = other.combine_args().routing;
  rank.meet();
  require(mk_moe_gemm_combine(rank.comm, &combine, rank.stream), "mk_moe_gemm_combine", rank.comm);
  expect_data_error(tally, rank, -1, "pass the records of one dispatch");
}

}  // namespace operators
