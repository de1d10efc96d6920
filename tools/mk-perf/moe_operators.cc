// SPDX-License-Identifier: MIT
// The mixture-of-experts operators: one batch of tokens, of which each rank holds a slice, through experts that
// are spread over the ranks. Every token goes to topk different experts, chosen at random.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "element.h"
#include "errors.h"
#include "moe_routing.h"
#include "operators.h"
#include "reference.h"

namespace perf {
namespace {

const ShapeKeys kKeys = {{"tokens"},      {"hidden"},       {"inter"}, {"experts", 1, 65536},
                         {"topk", 1, 16}, {"zipf", 0, 1, 0}};

constexpr uint64_t kSeedRows = 0xc3;
constexpr uint64_t kSeedWeights = 0xd4;
constexpr uint64_t kSeedFactors = 0xf6;
// About a quarter of a second of reference a set and pattern.
constexpr int64_t kMaxReferenceProducts = int64_t{1} << 22;

struct Buffers {
  DeviceBuffer rows;     // dispatch: this rank's tokens; combine: its experts' rows
  DeviceBuffer w;        // [local experts, inner, columns]
  DeviceBuffer factors;  // combine: [tokens, topk]
  DeviceBuffer y;
};

class MoeProblem : public Problem {
 public:
  MoeProblem(bool combines, const Context& context, const Shape& shape)
      : MoeProblem(combines, context, shape, ExpertRouting(shape, context.nranks)) {}
  MoeProblem(bool combines, const Context& context, const Shape& shape, ExpertRouting routing)
      : combines_(combines),
        context_(context),
        shape_(shape),
        routing_(std::move(routing)),
        tokens_(slice_of(shape["tokens"], context.rank, context.nranks)),
        experts_(slice_of(shape["experts"], context.rank, context.nranks)),
        rows_(routing_.rows_of(experts_)),
        sample_(choose_sample({0, 0, output_rows(), columns()}, inner() * (combines ? shape["topk"] : 1),
                              kMaxReferenceProducts, 1)) {}

  double flops() const override {
    return 2.0 * static_cast<double>(rows_.size()) * static_cast<double>(shape_["hidden"]) *
           static_cast<double>(shape_["inter"]);
  }

  size_t bytes_per_set() const override {
    return rows_bytes() + weights_bytes() + factors_bytes() + output_bytes();
  }

  void allocate(int num_sets) override {
    const auto buffer = [this](size_t bytes) {
      return DeviceBuffer(*context_.device, std::max<size_t>(bytes, 16));
    };
    mk_moe_maxima_t maxima = MK_MOE_MAXIMA_INIT;
    maxima.tokens = (shape_["tokens"] + context_.nranks - 1) / context_.nranks;
    maxima.capacity_rows = routing_.capacity();
    set_sizes(maxima);
    size_t record_bytes = 0;
    require(mk_moe_routing_bytes(&maxima, context_.nranks, &record_bytes), "mk_moe_routing_bytes",
            context_.comm);
    require(mk_moe_dispatch_gemm_prepare(context_.comm, &maxima), "mk_moe_dispatch_gemm_prepare",
            context_.comm);
    record_.push_back(buffer(record_bytes));
    const auto entries = static_cast<size_t>((tokens_.end - tokens_.begin) * shape_["topk"]);
    topk_idx_.push_back(buffer(entries * sizeof(int32_t)));
    if (entries > 0) {
      staging_.assign(topk_idx_[0].bytes(), 0);
      std::memcpy(staging_.data(), routing_.of_token(tokens_.begin), entries * sizeof(int32_t));
      topk_idx_[0].upload(staging_.data());
    }
    sets_.reserve(static_cast<size_t>(num_sets));
    for (int set = 0; set < num_sets; ++set) {
      sets_.push_back(
          {buffer(rows_bytes()), buffer(weights_bytes()), buffer(factors_bytes()), buffer(output_bytes())});
    }
    if (combines_) make_record();
  }

  void fill(int set, Pattern pattern) override {
    const Buffers& set_buffers = sets_[static_cast<size_t>(set)];
    fill_matrix(set_buffers.rows, input_rows_count(), inner(), input_rows(set, pattern),
                combines_ ? routing_.first_row(experts_.begin) : tokens_.begin);
    fill_matrix(set_buffers.w, (experts_.end - experts_.begin) * inner(), columns(),
                input_weights(set, pattern), experts_.begin * inner());
    if (combines_) {
      fill_rows(set_buffers.factors, tokens_.end - tokens_.begin, shape_["topk"], MK_DTYPE_FP32,
                [&](int64_t row, int64_t k) { return factor(set, pattern, tokens_.begin + row, k); });
    }
    poison(set);
  }

  void poison(int set) override {
    const DeviceBuffer& y = sets_[static_cast<size_t>(set)].y;
    const mk_dtype_t dtype = context_.dtypes.out_dtype;
    if (context_.device->matrices) {
      context_.device->matrices->poison(y.data(), dtype,
                                        static_cast<int64_t>(y.bytes() / element_bytes(dtype)));
      return;
    }
    staging_.resize(y.bytes());
    poison_elements(dtype, staging_.data(), static_cast<int64_t>(y.bytes() / element_bytes(dtype)));
    y.upload(staging_.data());
  }

  void run(int set) override {
    const Buffers& buffers = sets_[static_cast<size_t>(set)];
    if (!combines_) return dispatch(shape_["hidden"], shape_["inter"], buffers.rows, buffers.w, buffers.y);
    mk_moe_gemm_combine_args_t args = MK_MOE_GEMM_COMBINE_ARGS_INIT;
    set_sizes(args);
    args.tokens = tokens_.end - tokens_.begin;
    args.rows = buffers.rows.data();
    args.ld_rows = args.inter;
    args.w = buffers.w.data();
    args.routing = static_cast<const mk_moe_routing_t*>(record_[0].data());
    args.routing_bytes = record_[0].bytes();
    args.topk_weights = static_cast<const float*>(buffers.factors.data());
    args.y = buffers.y.data();
    args.ldy = args.hidden;
    require(mk_moe_gemm_combine(context_.comm, &args, context_.device->stream()), "mk_moe_gemm_combine",
            context_.comm);
  }

  void check(int set, Pattern pattern, Check& result) override {
    const bool integers = pattern == Pattern::kIntegers;
    const Comparison comparison = compared(set, reference(set, pattern), integers);
    result.whole = sample_.whole;
    result.complete = result.complete && comparison.complete;
    if (integers) {
      result.exact = result.exact && comparison.exact;
    } else {
      result.relative_error = std::max(result.relative_error, comparison.relative_error());
    }
    result.relative_error_limit = relative_error_limit(context_.dtypes.out_dtype);
    if (result.problem.empty() && !comparison.problem.empty()) {
      result.problem = std::string(integers ? "integer inputs: " : "random inputs: ") + comparison.problem;
    }
  }

  uint64_t output_hash(int set) override {
    if (context_.device->matrices) return context_.device->matrices->scan(output_matrix(set)).hash;
    const Output output = downloaded_output(set);
    const auto bytes = static_cast<size_t>(output.rows * output.cols) * element_bytes(output.dtype);
    uint64_t hash = 0;
    for (size_t offset = 0; offset < bytes; offset += 8) {
      uint64_t word = 0;
      std::memcpy(&word, staging_.data() + offset, std::min<size_t>(8, bytes - offset));
      hash = index_hash(hash, word, offset);
    }
    return hash;
  }

  std::optional<UnfusedExperts> unfused_experts() const override {
    UnfusedExperts pair;
    pair.combines = combines_;
    pair.hidden = shape_["hidden"];
    pair.inter = shape_["inter"];
    pair.topk = routing_.topk();
    pair.dtypes = context_.dtypes;
    pair.exchange = make_expert_exchange(routing_, context_.rank, context_.nranks);
    return pair;
  }

  ExpertOperands expert_operands(int set) const override {
    const Buffers& buffers = sets_[static_cast<size_t>(set)];
    return {buffers.rows.data(), buffers.w.data(), static_cast<const float*>(buffers.factors.data()),
            buffers.y.data()};
  }

  // A token goes once to a rank. Each of its rows comes home: it is their rounded values that are added up.
  std::optional<double> link_bytes() const override {
    const auto rows = static_cast<double>(busiest_link_rows(routing_, context_.nranks, !combines_));
    const mk_dtype_t dtype = combines_ ? context_.dtypes.out_dtype : context_.dtypes.dtype;
    return rows * static_cast<double>(shape_["hidden"]) * static_cast<double>(element_bytes(dtype));
  }

  // Each row of this rank's experts as a token of its own, which goes to that expert alone.
  std::unique_ptr<Problem> alone(const Context& solo) const override {
    const int64_t num_experts = std::max<int64_t>(1, experts_.end - experts_.begin);
    std::vector<int32_t> chosen;
    for (const ExpertRow& row : rows_) chosen.push_back(static_cast<int32_t>(row.expert - experts_.begin));
    const Shape shape = {{"tokens", static_cast<int64_t>(rows_.size())},
                         {"hidden", shape_["hidden"]},
                         {"inter", shape_["inter"]},
                         {"experts", num_experts},
                         {"topk", 1},
                         {"zipf", shape_["zipf"]}};
    return std::make_unique<MoeProblem>(combines_, solo, shape,
                                        ExpertRouting(std::move(chosen), 1, num_experts, 1));
  }

 private:
  int64_t inner() const { return combines_ ? shape_["inter"] : shape_["hidden"]; }
  int64_t columns() const { return combines_ ? shape_["hidden"] : shape_["inter"]; }
  int64_t output_rows() const {
    return combines_ ? tokens_.end - tokens_.begin : static_cast<int64_t>(rows_.size());
  }
  int64_t input_rows_count() const {
    return combines_ ? static_cast<int64_t>(rows_.size()) : tokens_.end - tokens_.begin;
  }
  size_t rows_bytes() const { return static_cast<size_t>(input_rows_count() * inner()) * 2; }
  size_t weights_bytes() const {
    return static_cast<size_t>((experts_.end - experts_.begin) * inner() * columns()) * 2;
  }
  size_t factors_bytes() const {
    return combines_ ? static_cast<size_t>((tokens_.end - tokens_.begin) * shape_["topk"]) * sizeof(float) : 0;
  }
  // A dispatch has room for as many rows as any rank gets.
  size_t output_bytes() const {
    const int64_t rows = combines_ ? output_rows() : routing_.capacity();
    return static_cast<size_t>(rows * columns()) * element_bytes(context_.dtypes.out_dtype);
  }

  template <typename Sizes>
  void set_sizes(Sizes& sizes) const {
    sizes.hidden = shape_["hidden"];
    sizes.inter = shape_["inter"];
    sizes.experts = static_cast<int32_t>(shape_["experts"]);
    sizes.topk = static_cast<int32_t>(shape_["topk"]);
    sizes.dtype = context_.dtypes.dtype;
    sizes.out_dtype = context_.dtypes.out_dtype;
  }

  void dispatch(int64_t hidden, int64_t inter, const DeviceBuffer& x, const DeviceBuffer& w,
                const DeviceBuffer& y) {
    mk_moe_dispatch_gemm_args_t args = MK_MOE_DISPATCH_GEMM_ARGS_INIT;
    set_sizes(args);
    args.tokens = tokens_.end - tokens_.begin;
    args.hidden = hidden;
    args.inter = inter;
    args.capacity_rows = routing_.capacity();
    args.x = x.data();
    args.ldx = hidden;
    args.topk_idx = topk_idx_[0].data();
    args.w = w.data();
    args.y = y.data();
    args.ldy = inter;
    args.routing = static_cast<mk_moe_routing_t*>(record_[0].data());
    args.routing_bytes = record_[0].bytes();
    require(mk_moe_dispatch_gemm(context_.comm, &args, context_.device->stream()), "mk_moe_dispatch_gemm",
            context_.comm);
  }

  // The record that the combines work from: that of a dispatch of the narrowest rows. All ranks are here
  // together.
  void make_record() {
    constexpr int64_t kNarrow = 8;
    const auto buffer = [this](int64_t elements) {
      return DeviceBuffer(*context_.device, static_cast<size_t>(elements + kNarrow) * 4);
    };
    const DeviceBuffer x = buffer((tokens_.end - tokens_.begin) * kNarrow);
    const DeviceBuffer w = buffer((experts_.end - experts_.begin) * kNarrow * kNarrow);
    const DeviceBuffer y = buffer(routing_.capacity() * kNarrow);
    for (const DeviceBuffer* zeros : {&x, &w}) {
      staging_.assign(zeros->bytes(), 0);
      zeros->upload(staging_.data());
    }
    dispatch(kNarrow, kNarrow, x, w, y);
    require(mk_comm_synchronize(context_.comm, context_.device->stream()), "mk_comm_synchronize",
            context_.comm);
  }

  // Rows of the batch's tokens, or (combine) of their topk choices: the same on every rank.
  InputMatrix input_rows(int set, Pattern pattern) const {
    InputMatrix input{pattern, context_.dtypes.dtype, kSeedRows + 0x100 * static_cast<uint64_t>(set), 1};
    const int64_t limit = exact_integer_limit(context_.dtypes.out_dtype);
    input.run_length = exact_run_length(inner(), combines_ ? limit / shape_["topk"] : limit);
    return input;
  }
  InputMatrix input_weights(int set, Pattern pattern) const {
    return {pattern, context_.dtypes.dtype, kSeedWeights + 0x100 * static_cast<uint64_t>(set), 1};
  }
  float factor(int set, Pattern pattern, int64_t token, int64_t k) const {
    const uint64_t hash = index_hash(kSeedFactors + static_cast<uint64_t>(set), static_cast<uint64_t>(token),
                                     static_cast<uint64_t>(k));
    if (pattern == Pattern::kIntegers) return hash & 1 ? 1.0f : -1.0f;
    return static_cast<float>(hash >> 40) * 0x1p-24f;
  }

  template <typename Value>
  void fill_rows(const DeviceBuffer& buffer, int64_t rows, int64_t cols, mk_dtype_t dtype, const Value& value) {
    staging_.assign(buffer.bytes(), 0);
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t col = 0; col < cols; ++col)
        store_element(dtype, staging_.data(), row * cols + col, value(row, col));
    }
    buffer.upload(staging_.data());
  }

  // Element (r, c) is input(row + r, c).
  void fill_matrix(const DeviceBuffer& buffer, int64_t rows, int64_t cols, const InputMatrix& input,
                   int64_t row) {
    if (context_.device->matrices) {
      context_.device->matrices->fill({buffer.data(), input.dtype, rows, cols, cols}, input, row, 0, false,
                                      true);
      return;
    }
    fill_rows(buffer, rows, cols, input.dtype, [&](int64_t r, int64_t c) { return input.value(row + r, c); });
  }

  // A row of the batch through its expert, for the sampled columns.
  void add_product(const InputMatrix& rows, int64_t row, const InputMatrix& w, int expert, double scale,
                   double* sums) const {
    for (int64_t kk = 0; kk < inner(); ++kk) {
      const double element = scale * static_cast<double>(rows.value(row, kk));
      if (element == 0) continue;
      for (size_t j = 0; j < sample_.cols.size(); ++j)
        sums[j] += element * static_cast<double>(w.value(expert * inner() + kk, sample_.cols[j]));
    }
  }

  std::vector<double> reference(int set, Pattern pattern) const {
    const InputMatrix rows = input_rows(set, pattern);
    const InputMatrix w = input_weights(set, pattern);
    std::vector<double> expected(sample_.rows.size() * sample_.cols.size());
    for (size_t i = 0; i < sample_.rows.size(); ++i) {
      double* sums = expected.data() + i * sample_.cols.size();
      if (!combines_) {
        const ExpertRow& row = rows_[static_cast<size_t>(sample_.rows[i])];
        add_product(rows, row.token, w, row.expert, 1, sums);
        continue;
      }
      const int64_t token = tokens_.begin + sample_.rows[i];
      for (int k = 0; k < static_cast<int>(shape_["topk"]); ++k) {
        add_product(rows, routing_.row_number(token, k), w, routing_.expert(token, k),
                    static_cast<double>(factor(set, pattern, token, k)), sums);
      }
    }
    return expected;
  }

  DeviceMatrix output_matrix(int set) const {
    return {sets_[static_cast<size_t>(set)].y.data(), context_.dtypes.out_dtype, output_rows(), columns(),
            columns()};
  }

  Comparison compared(int set, const std::vector<double>& reference, bool integers) {
    if (!context_.device->matrices) return compare(downloaded_output(set), sample_, reference, integers);
    const DeviceMatrix output = output_matrix(set);
    const MatrixScan scan = context_.device->matrices->scan(output);
    const size_t row_bytes = static_cast<size_t>(columns()) * element_bytes(output.dtype);
    staging_.resize(row_bytes * sample_.rows.size());
    Sample sample = sample_;
    for (size_t row = 0; row < sample.rows.size(); ++row) {
      context_.device->download(
          staging_.data() + row * row_bytes,
          static_cast<const char*>(output.data) + static_cast<size_t>(sample.rows[row]) * row_bytes, row_bytes);
      sample.rows[row] = static_cast<int64_t>(row);
    }
    const Output rows = {staging_.data(), output.dtype, static_cast<int64_t>(sample.rows.size()), columns(),
                         columns()};
    Comparison comparison = compare(rows, sample, reference, integers);
    if (scan.first_bad < 0) return comparison;
    comparison.complete = false;
    comparison.problem = "row " + std::to_string(scan.first_bad / columns()) + ", column " +
                         std::to_string(scan.first_bad % columns()) + ": never written, or not finite";
    return comparison;
  }

  Output downloaded_output(int set) {
    const DeviceBuffer& y = sets_[static_cast<size_t>(set)].y;
    staging_.resize(y.bytes());
    y.download(staging_.data());
    return {staging_.data(), context_.dtypes.out_dtype, output_rows(), columns(), columns()};
  }

  bool combines_;
  Context context_;
  Shape shape_;
  ExpertRouting routing_;
  Slice tokens_;
  Slice experts_;
  std::vector<ExpertRow> rows_;  // of this rank's experts
  Sample sample_;
  std::vector<DeviceBuffer> record_;    // one, once allocated
  std::vector<DeviceBuffer> topk_idx_;  // one, once allocated
  std::vector<Buffers> sets_;
  std::vector<unsigned char> staging_;
};

template <bool combines>
std::unique_ptr<Problem> make(const Context& context, const Shape& shape) {
  return std::make_unique<MoeProblem>(combines, context, shape);
}

void validate(const Shape& shape, int) {
  const std::string where = "--shape \"" + shape.text() + "\": ";
  if (shape["topk"] > shape["experts"]) throw UsageError(where + "topk exceeds experts");
  for (const char* key : {"hidden", "inter"}) {
    if (shape[key] % 8) throw UsageError(where + key + " is not a multiple of 8");
  }
  if (shape["tokens"] > (int64_t{1} << 31) / shape["topk"] - 1)
    throw UsageError(where + "tokens * topk exceeds 2^31");
}

template <typename Args>
mk_status_t ask(const Context& context, Args args, mk_status_t (*plan_of)(mk_comm_t, const Args*, mk_plan_t*)) {
  mk_plan_t plan = MK_PLAN_INIT;
  args.tokens = args.hidden = args.inter = 64;
  args.experts = 8;
  args.topk = 2;
  args.dtype = context.dtypes.dtype;
  args.out_dtype = context.dtypes.out_dtype;
  return plan_of(context.comm, &args, &plan);
}

mk_status_t ask_dispatch(const Context& context) {
  return ask<mk_moe_dispatch_gemm_args_t>(context, MK_MOE_DISPATCH_GEMM_ARGS_INIT, mk_moe_dispatch_gemm_plan);
}
mk_status_t ask_combine(const Context& context) {
  return ask<mk_moe_gemm_combine_args_t>(context, MK_MOE_GEMM_COMBINE_ARGS_INIT, mk_moe_gemm_combine_plan);
}

}  // namespace

const Operator kMoeDispatchGemm = {"moe_dispatch_gemm", kKeys, ask_dispatch, validate, make<false>};
const Operator kMoeGemmCombine = {"moe_gemm_combine", kKeys, ask_combine, validate, make<true>};

}  // namespace perf
