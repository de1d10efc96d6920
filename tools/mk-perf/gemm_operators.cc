// SPDX-License-Identifier: MIT
// The three GEMM operators. To a benchmark they are one global product C[M, N] = A[M, K] * B[K, N] of which
// each rank holds a window of A, of B and of C. In the all-gather's mode WGRAD A is dY^T, of which a rank holds
// whole rows, transposed in memory, and B is X; m is then the inner dimension, n the columns of X, k the local
// columns of dY.
#include <algorithm>
#include <cstring>

#include "element.h"
#include "errors.h"
#include "operators.h"
#include "reference.h"
#include "roofline.h"

namespace perf {
namespace {

enum class Kind { kAllgatherGemm, kAllgatherGemmWgrad, kGemmReduceScatter, kGemmAllreduce };

constexpr uint64_t kSeedA = 0xa1;
constexpr uint64_t kSeedB = 0xb2;
constexpr uint64_t kSeedC = 0xc3;
// About a quarter of a second of reference a pattern; on the host executor, whose shapes are small, a set and
// pattern.
constexpr int64_t kMaxReferenceProducts = int64_t{1} << 27;

int64_t padded(int64_t columns) { return (columns + 7) / 8 * 8; }

struct Windows {
  Window a;  // what the argument a points to: of A; of X = B in mode WGRAD
  Window b;  // likewise; of dY, which is A transposed, in mode WGRAD
  Window c;
  int64_t inner;  // of the global product
};

// The distribution of each operator, as mkernel.h gives it: rank r owns rows [r*ceil(m/W), min(m,
// (r+1)*ceil(m/W))).
Windows kn_windows_of(Kind kind, const Shape& shape, int rank, int nranks) {
  const int64_t m = shape["m"];
  const int64_t n = shape["n"];
  const int64_t k = shape["k"];
  const int64_t rows_a_rank = (m + nranks - 1) / nranks;
  const int64_t first_row = std::min(m, rank * rows_a_rank);
  const int64_t own_rows = std::min(m, (rank + 1) * rows_a_rank) - first_row;
  switch (kind) {
    case Kind::kAllgatherGemm:
      return {{first_row, 0, own_rows, k}, {0, rank * n, k, n}, {0, rank * n, m, n}, k};
    case Kind::kAllgatherGemmWgrad:
      return {{first_row, 0, own_rows, n}, {0, rank * k, m, k}, {rank * k, 0, k, n}, m};
    case Kind::kGemmReduceScatter:
      return {{0, rank * k, m, k}, {rank * k, 0, k, n}, {first_row, 0, own_rows, n}, nranks * k};
    case Kind::kGemmAllreduce:
      break;
  }
  return {{0, rank * k, m, k}, {rank * k, 0, k, n}, {0, 0, m, n}, nranks * k};
}

// With layout NK what is in memory is B transposed.
Windows windows_of(Kind kind, const Shape& shape, const Context& context) {
  Windows windows = kn_windows_of(kind, shape, context.rank, context.nranks);
  const Window b = windows.b;
  if (context.b_layout == MK_LAYOUT_NK) windows.b = {b.col, b.row, b.cols, b.rows};
  return windows;
}

struct Buffers {
  DeviceBuffer a;
  DeviceBuffer b;
  DeviceBuffer c;
};

template <typename Args>
void set_sizes_and_pointers(Args& args, const Shape& shape, const Windows& windows, const Context& context,
                            const Buffers& buffers) {
  args.m = shape["m"];
  args.n = shape["n"];
  args.k = shape["k"];
  args.dtype = context.dtypes.dtype;
  args.out_dtype = context.dtypes.out_dtype;
  args.b_layout = context.b_layout;
  args.a = buffers.a.data();
  args.lda = padded(args.k);
  args.b = buffers.b.data();
  args.ldb = padded(windows.b.cols);
  args.c = buffers.c.data();
  args.ldc = padded(args.n);
  args.accumulate = context.accumulate ? 1 : 0;
}

class GemmProblem : public Problem {
 public:
  GemmProblem(Kind kind, const Context& context, const Shape& shape)
      : kind_(kind), context_(context), shape_(shape), windows_(windows_of(kind, shape, context)) {}

  double flops() const override {
    return 2.0 * static_cast<double>(shape_["m"]) * static_cast<double>(shape_["n"]) *
           static_cast<double>(shape_["k"]);
  }

  size_t bytes_per_set() const override {
    return bytes_of(windows_.a, context_.dtypes.dtype) + bytes_of(windows_.b, context_.dtypes.dtype) +
           bytes_of(windows_.c, context_.dtypes.out_dtype);
  }

  void allocate(int num_sets) override {
    sample_ = choose_sample(windows_.c, windows_.inner, max_reference_products(num_sets), 1);
    sets_.reserve(static_cast<size_t>(num_sets));
    for (int set = 0; set < num_sets; ++set) {
      sets_.push_back({DeviceBuffer(*context_.device, bytes_of(windows_.a, context_.dtypes.dtype)),
                       DeviceBuffer(*context_.device, bytes_of(windows_.b, context_.dtypes.dtype)),
                       make_output()});
    }
  }

  void fill(int set, Pattern pattern) override {
    const bool wgrad = kind_ == Kind::kAllgatherGemmWgrad;
    const bool nk = context_.b_layout == MK_LAYOUT_NK;
    const InputMatrix a = input_a(set, pattern);
    const InputMatrix b = input_b(set, pattern);
    fill_window(buffers(set).a, windows_.a, wgrad ? b : a, false);
    fill_window(buffers(set).b, windows_.b, wgrad ? a : b, wgrad != nk);
    pattern_ = pattern;
    poison(set);
  }

  void poison(int set) override {
    const DeviceBuffer& c = buffers(set).c;
    const mk_dtype_t dtype = context_.dtypes.out_dtype;
    if (context_.device->matrices) {
      context_.device->matrices->poison(c.data(), dtype,
                                        static_cast<int64_t>(c.bytes() / element_bytes(dtype)));
      if (context_.accumulate) {
        context_.device->matrices->fill(output_matrix(set), input_c(set), windows_.c.row, windows_.c.col, false,
                                        false);
      }
      return;
    }
    staging_.resize(c.bytes());
    poison_elements(dtype, staging_.data(), static_cast<int64_t>(c.bytes() / element_bytes(dtype)));
    if (context_.accumulate) store_window(windows_.c, input_c(set), false);
    c.upload(staging_.data());
  }

  void run(int set) override {
    const mk_stream_t stream = context_.device->stream();
    with_call(buffers(set), [&](const auto& args, auto* call, auto*, const char* name) {
      require(call(context_.comm, &args, stream), name, context_.comm);
    });
  }

  std::optional<mk_plan_t> plan() const override {
    mk_plan_t plan = MK_PLAN_INIT;
    with_call(buffers(0), [&](const auto& args, auto*, auto* plan_of, const char* name) {
      require(plan_of(context_.comm, &args, &plan), name, context_.comm);
    });
    return plan;
  }

  void check(int set, Pattern pattern, Check& result) override {
    std::vector<double> reference =
        reference_product(input_a(set, pattern), input_b(set, pattern), windows_.inner, windows_.c, sample_);
    if (context_.accumulate) add_sample(input_c(set), windows_.c, sample_, reference);
    const bool integers = pattern == Pattern::kIntegers;
    const Comparison comparison = compared(set, reference, integers);
    result.whole = sample_.whole;
    result.complete = result.complete && comparison.complete;
    if (integers) {
      result.exact = result.exact && comparison.exact;
    } else {
      result.relative_error = std::max(result.relative_error, comparison.relative_error());
    }
    result.relative_error_limit = error_limit();
    if (result.problem.empty() && !comparison.problem.empty()) {
      result.problem = std::string(integers ? "integer inputs: " : "random inputs: ") + comparison.problem;
    }
  }

  uint64_t output_hash(int set) override {
    if (context_.device->matrices) return context_.device->matrices->scan(output_matrix(set)).hash;
    const Output output = downloaded_output(set);
    const size_t row_bytes = static_cast<size_t>(output.cols) * element_bytes(output.dtype);
    const size_t ld_bytes = static_cast<size_t>(output.ld) * element_bytes(output.dtype);
    uint64_t hash = 0;
    for (int64_t row = 0; row < output.rows; ++row) {
      const unsigned char* bytes = staging_.data() + static_cast<size_t>(row) * ld_bytes;
      for (size_t offset = 0; offset < row_bytes; offset += 8) {
        uint64_t word = 0;
        std::memcpy(&word, bytes + offset, std::min<size_t>(8, row_bytes - offset));
        hash = index_hash(hash, word, offset);
      }
    }
    return hash;
  }

  std::optional<UnfusedShape> unfused() const override {
    UnfusedShape pair;
    pair.collective = kind_ == Kind::kGemmReduceScatter ? Collective::kReduceScatter
                      : kind_ == Kind::kGemmAllreduce   ? Collective::kAllReduce
                                                        : Collective::kAllGather;
    pair.is_wgrad = kind_ == Kind::kAllgatherGemmWgrad;
    pair.m = shape_["m"];
    pair.n = shape_["n"];
    pair.k = shape_["k"];
    pair.lda = padded(windows_.a.cols);
    pair.ldb = padded(windows_.b.cols);
    pair.ldc = padded(pair.n);
    pair.b_layout = context_.b_layout;
    pair.accumulate = context_.accumulate;
    pair.dtypes = context_.dtypes;
    return pair;
  }

  Operands operands(int set) const override {
    return {buffers(set).a.data(), buffers(set).b.data(), buffers(set).c.data()};
  }

  std::optional<double> link_bytes() const override {
    const std::optional<UnfusedShape> pair = unfused();
    return pair ? perf::link_bytes(*pair, context_.nranks) : std::optional<double>();
  }

  // On the same shape.
  std::unique_ptr<Problem> alone(const Context& solo) const override {
    return std::make_unique<GemmProblem>(kind_, solo, shape_);
  }

 private:
  static size_t bytes_of(const Window& window, mk_dtype_t dtype) {
    return static_cast<size_t>(window.rows) * static_cast<size_t>(padded(window.cols)) * element_bytes(dtype);
  }

  const Buffers& buffers(int set) const { return sets_[static_cast<size_t>(set)]; }

  // Peers write an all-reduce's, and of the others no output that is asked for here.
  DeviceBuffer make_output() const {
    const size_t bytes = bytes_of(windows_.c, context_.dtypes.out_dtype);
    if (context_.symmetric && context_.nranks > 1 && kind_ == Kind::kGemmAllreduce)
      return DeviceBuffer(*context_.device, context_.comm, bytes);
    return DeviceBuffer(*context_.device, bytes);
  }

  // Gives use(arguments, the call, its plan, its name).
  template <typename Use>
  void with_call(const Buffers& buffers, const Use& use) const {
    switch (kind_) {
      case Kind::kAllgatherGemm:
      case Kind::kAllgatherGemmWgrad: {
        mk_allgather_gemm_args_t args = MK_ALLGATHER_GEMM_ARGS_INIT;
        set_sizes_and_pointers(args, shape_, windows_, context_, buffers);
        args.lda = padded(windows_.a.cols);
        if (kind_ == Kind::kAllgatherGemmWgrad) args.mode = MK_ALLGATHER_WGRAD;
        return use(args, mk_allgather_gemm, mk_allgather_gemm_plan, "mk_allgather_gemm");
      }
      case Kind::kGemmReduceScatter: {
        mk_gemm_reduce_scatter_args_t args = MK_GEMM_REDUCE_SCATTER_ARGS_INIT;
        set_sizes_and_pointers(args, shape_, windows_, context_, buffers);
        args.comm_dtype = context_.dtypes.comm_dtype;
        return use(args, mk_gemm_reduce_scatter, mk_gemm_reduce_scatter_plan, "mk_gemm_reduce_scatter");
      }
      case Kind::kGemmAllreduce: {
        mk_gemm_allreduce_args_t args = MK_GEMM_ALLREDUCE_ARGS_INIT;
        set_sizes_and_pointers(args, shape_, windows_, context_, buffers);
        args.comm_dtype = context_.dtypes.comm_dtype;
        return use(args, mk_gemm_allreduce, mk_gemm_allreduce_plan, "mk_gemm_allreduce");
      }
    }
  }

  int64_t max_reference_products(int num_sets) const {
    return context_.device->matrices ? kMaxReferenceProducts / num_sets : kMaxReferenceProducts;
  }

  // Partial sums are rounded to comm_dtype, among one rank too; the all-gather has none.
  bool rounds_partial_sums() const {
    return kind_ == Kind::kGemmReduceScatter || kind_ == Kind::kGemmAllreduce;
  }

  double error_limit() const {
    const double output = relative_error_limit(context_.dtypes.out_dtype);
    return rounds_partial_sums() ? std::max(output, relative_error_limit(context_.dtypes.comm_dtype)) : output;
  }

  InputMatrix input_a(int set, Pattern pattern) const {
    InputMatrix input{pattern, context_.dtypes.dtype, kSeedA + 0x100 * static_cast<uint64_t>(set), 1};
    int64_t limit = exact_integer_limit(context_.dtypes.out_dtype);
    if (rounds_partial_sums()) limit = std::min(limit, exact_integer_limit(context_.dtypes.comm_dtype));
    // What is there already is at most 2.
    input.run_length = exact_run_length(windows_.inner, context_.accumulate ? limit - 2 : limit);
    return input;
  }

  // What an output has that is added to.
  InputMatrix input_c(int set) const {
    return {pattern_, context_.dtypes.out_dtype, kSeedC + 0x100 * static_cast<uint64_t>(set), 1};
  }

  InputMatrix input_b(int set, Pattern pattern) const {
    return {pattern, context_.dtypes.dtype, kSeedB + 0x100 * static_cast<uint64_t>(set), 1};
  }

  void fill_window(const DeviceBuffer& buffer, const Window& window, const InputMatrix& input,
                   bool transposed) {
    const int64_t ld = padded(window.cols);
    if (context_.device->matrices) {
      const DeviceMatrix matrix = {buffer.data(), input.dtype, window.rows, window.cols, ld};
      context_.device->matrices->fill(matrix, input, transposed ? window.col : window.row,
                                      transposed ? window.row : window.col, transposed, true);
      return;
    }
    staging_.assign(buffer.bytes(), 0);
    store_window(window, input, transposed);
    buffer.upload(staging_.data());
  }

  void store_window(const Window& window, const InputMatrix& input, bool transposed) {
    const int64_t ld = padded(window.cols);
    for (int64_t row = 0; row < window.rows; ++row) {
      for (int64_t col = 0; col < window.cols; ++col) {
        const float value = transposed ? input.value(window.col + col, window.row + row)
                                       : input.value(window.row + row, window.col + col);
        store_element(input.dtype, staging_.data(), row * ld + col, value);
      }
    }
  }

  DeviceMatrix output_matrix(int set) const {
    return {buffers(set).c.data(), context_.dtypes.out_dtype, windows_.c.rows, windows_.c.cols,
            padded(windows_.c.cols)};
  }

  Comparison compared(int set, const std::vector<double>& reference, bool integers) {
    if (!context_.device->matrices) return compare(downloaded_output(set), sample_, reference, integers);
    const MatrixScan scan = context_.device->matrices->scan(output_matrix(set));
    Sample sample = sample_;
    for (size_t row = 0; row < sample.rows.size(); ++row) sample.rows[row] = static_cast<int64_t>(row);
    Comparison comparison = compare(downloaded_sample(set), sample, reference, integers);
    if (scan.first_bad < 0) return comparison;
    const int64_t ld = padded(windows_.c.cols);
    comparison.complete = false;
    comparison.problem = "row " + std::to_string(scan.first_bad / ld) + ", column " +
                         std::to_string(scan.first_bad % ld) +
                         (scan.first_bad % ld < windows_.c.cols ? ": never written, or not finite"
                                                                : ": written beyond the row's last element");
    return comparison;
  }

  // The rows of the sample, one below the other.
  Output downloaded_sample(int set) {
    const DeviceMatrix output = output_matrix(set);
    const size_t element = element_bytes(output.dtype);
    const size_t row_bytes = static_cast<size_t>(output.cols) * element;
    staging_.resize(row_bytes * sample_.rows.size());
    for (size_t row = 0; row < sample_.rows.size(); ++row) {
      const auto offset = static_cast<size_t>(sample_.rows[row] * output.ld) * element;
      context_.device->download(staging_.data() + row * row_bytes,
                                static_cast<const char*>(output.data) + offset, row_bytes);
    }
    return {staging_.data(), output.dtype, static_cast<int64_t>(sample_.rows.size()), output.cols, output.cols};
  }

  Output downloaded_output(int set) {
    const DeviceBuffer& c = buffers(set).c;
    staging_.resize(c.bytes());
    c.download(staging_.data());
    return {staging_.data(), context_.dtypes.out_dtype, windows_.c.rows, windows_.c.cols,
            padded(windows_.c.cols)};
  }

  Kind kind_;
  Context context_;
  Shape shape_;
  Windows windows_;
  Sample sample_;
  Pattern pattern_ = Pattern::kRandom;  // of what the sets were filled with
  std::vector<Buffers> sets_;
  std::vector<unsigned char> staging_;
};

template <Kind kind>
std::unique_ptr<Problem> make(const Context& context, const Shape& shape) {
  return std::make_unique<GemmProblem>(kind, context, shape);
}

template <typename Args>
mk_status_t ask(const Context& context, Args args, mk_status_t (*plan_of)(mk_comm_t, const Args*, mk_plan_t*)) {
  mk_plan_t plan = MK_PLAN_INIT;
  args.m = args.n = args.k = args.lda = args.ldb = args.ldc = 64;
  args.dtype = context.dtypes.dtype;
  args.out_dtype = context.dtypes.out_dtype;
  return plan_of(context.comm, &args, &plan);
}

void validate(const Shape& shape, int nranks) {
  // Bytes of the largest matrix must stay addressable with 64-bit offsets.
  const double largest = std::max({static_cast<double>(shape["m"]) * static_cast<double>(shape["n"]),
                                   static_cast<double>(shape["m"]) * static_cast<double>(shape["k"]),
                                   static_cast<double>(shape["n"]) * static_cast<double>(shape["k"])}) *
                         nranks * 4;
  if (largest > 0x1p60) throw UsageError("--shape \"" + shape.text() + "\": a matrix has more than 2^60 bytes");
}

const ShapeKeys kKeys = {{"m"}, {"n"}, {"k"}};

// The least that keeps rows aligned.
constexpr int64_t kHardlyAny = 8;

Shape gather_alone(const Shape& shape) { return {{"m", shape["m"]}, {"n", kHardlyAny}, {"k", shape["k"]}}; }
Shape reduction_alone(const Shape& shape) { return {{"m", shape["m"]}, {"n", shape["n"]}, {"k", kHardlyAny}}; }

}  // namespace

const Operator kAllgatherGemm = {"allgather_gemm",
                                 kKeys,
                                 [](const Context& context) {
                                   return ask<mk_allgather_gemm_args_t>(context, MK_ALLGATHER_GEMM_ARGS_INIT,
                                                                        mk_allgather_gemm_plan);
                                 },
                                 validate,
                                 make<Kind::kAllgatherGemm>,
                                 true,
                                 nullptr,
                                 gather_alone,
                                 true};

const Operator kAllgatherGemmWgrad = {"allgather_gemm_wgrad",
                                      kKeys,
                                      [](const Context& context) {
                                        mk_allgather_gemm_args_t args = MK_ALLGATHER_GEMM_ARGS_INIT;
                                        args.mode = MK_ALLGATHER_WGRAD;
                                        return ask(context, args, mk_allgather_gemm_plan);
                                      },
                                      validate,
                                      make<Kind::kAllgatherGemmWgrad>,
                                      true,
                                      nullptr,
                                      nullptr,
                                      true};

const Operator kGemmReduceScatter = {"gemm_reduce_scatter",
                                     kKeys,
                                     [](const Context& context) {
                                       return ask<mk_gemm_reduce_scatter_args_t>(
                                           context, MK_GEMM_REDUCE_SCATTER_ARGS_INIT,
                                           mk_gemm_reduce_scatter_plan);
                                     },
                                     validate,
                                     make<Kind::kGemmReduceScatter>,
                                     true,
                                     nullptr,
                                     reduction_alone,
                                     true};

const Operator kGemmAllreduce = {"gemm_allreduce",
                                 kKeys,
                                 [](const Context& context) {
                                   return ask<mk_gemm_allreduce_args_t>(context, MK_GEMM_ALLREDUCE_ARGS_INIT,
                                                                        mk_gemm_allreduce_plan);
                                 },
                                 validate,
                                 make<Kind::kGemmAllreduce>,
                                 true,
                                 nullptr,
                                 reduction_alone,
                                 true};

}  // namespace perf
