// SPDX-License-Identifier: MIT
// Ring attention and its gradients: one attention over the whole sequence, of which each rank holds its slices.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <optional>

#include "attention_reference.h"
#include "attention_work.h"
#include "element.h"
#include "errors.h"
#include "operators.h"
#include "reference.h"

namespace perf {
namespace {

// About a quarter of a second of reference a pattern; on the host executor, whose shapes are small, a set and
// pattern.
constexpr int64_t kMaxReferenceProducts = int64_t{1} << 27;
constexpr double kLseErrorLimit = 1e-4;

// A set of a rank's tensors; those of the gradients are empty for the forward operator.
struct Buffers {
  DeviceBuffer q, k, v, o, lse, d_o, dq, dk, dv;
};

class AttentionProblem : public Problem {
 public:
  AttentionProblem(bool backward, const Context& context, const Shape& shape)
      : backward_(backward),
        context_(context),
        shape_(shape),
        positions_(attention_positions(shape, context.rank, context.nranks)) {}

  // Two products a pair of query and key forward, five backward: recomputing the weights is not counted. The
  // mean of the ranks.
  double flops() const override {
    return (backward_ ? 10 : 4) * all_visible_pairs(shape_) / context_.nranks *
           static_cast<double>(shape_["batch"] * shape_["heads"] * shape_["dim"]);
  }

  std::optional<double> link_bytes() const override {
    return attention_link_bytes(shape_, context_.nranks, backward_);
  }

  // As much to compute; what little is more or less is attention_alone_shape's factor.
  std::unique_ptr<Problem> alone(const Context& solo) const override {
    return std::make_unique<AttentionProblem>(backward_, solo,
                                              attention_alone_shape(shape_, context_.nranks).shape);
  }

  size_t bytes_per_set() const override {
    return backward_ ? 4 * query_bytes() + 4 * key_bytes() + lse_bytes()
                     : 2 * query_bytes() + 2 * key_bytes() + lse_bytes();
  }

  void allocate(int num_sets) override {
    const auto buffer = [&](size_t bytes) { return DeviceBuffer(*context_.device, bytes); };
    sets_.reserve(static_cast<size_t>(num_sets));
    for (int set = 0; set < num_sets; ++set) {
      const size_t queries = backward_ ? query_bytes() : 0;
      const size_t keys = backward_ ? key_bytes() : 0;
      sets_.push_back({buffer(query_bytes()), buffer(key_bytes()), buffer(key_bytes()), buffer(query_bytes()),
                       buffer(lse_bytes()), buffer(queries), buffer(queries), buffer(keys), buffer(keys)});
    }
    patterns_.resize(static_cast<size_t>(num_sets));
    if (!shape_["packed"]) return;
    std::vector<int32_t> bounds;
    const AttentionSequences sequences = attention_sequences(shape_);
    for (int sequence = 0; sequence <= sequences.count; ++sequence)
      bounds.push_back(static_cast<int32_t>(sequences.begin(sequence)));
    cu_seqlens_.emplace(buffer(bounds.size() * sizeof(int32_t)));
    cu_seqlens_->upload(bounds.data());
  }

  void fill(int set, Pattern pattern) override {
    patterns_[static_cast<size_t>(set)] = pattern;
    const AttentionInputs in = inputs(set);
    const Buffers& buffers = sets_[static_cast<size_t>(set)];
    fill_tensor(buffers.q, in, AttentionTensor::kQ);
    fill_tensor(buffers.k, in, AttentionTensor::kK);
    fill_tensor(buffers.v, in, AttentionTensor::kV);
    if (backward_) {
      fill_tensor(buffers.d_o, in, AttentionTensor::kDO);
      // What the gradients are given: all ranks are here together.
      run_forward(set);
      require(mk_comm_synchronize(context_.comm, context_.device->stream()), "mk_comm_synchronize",
              context_.comm);
    }
    poison(set);
  }

  void poison(int set) override {
    for (const DeviceMatrix& output : outputs(set)) {
      const int64_t elements = output.rows * output.cols;
      if (context_.device->matrices) {
        context_.device->matrices->poison(output.data, output.dtype, elements);
        continue;
      }
      staging_.resize(bytes_of(output));
      poison_elements(output.dtype, staging_.data(), elements);
      context_.device->upload(output.data, staging_.data(), staging_.size());
    }
  }

  void run(int set) override {
    if (!backward_) return run_forward(set);
    const mk_ring_attention_backward_args_t args = backward_args(set);
    require(mk_ring_attention_backward(context_.comm, &args, context_.device->stream()),
            "mk_ring_attention_backward", context_.comm);
  }

  std::optional<mk_plan_t> plan() const override {
    mk_plan_t plan = MK_PLAN_INIT;
    if (backward_) {
      const mk_ring_attention_backward_args_t args = backward_args(0);
      require(mk_ring_attention_backward_plan(context_.comm, &args, &plan), "mk_ring_attention_backward_plan",
              context_.comm);
    } else {
      const mk_ring_attention_args_t args = forward_args(0);
      require(mk_ring_attention_plan(context_.comm, &args, &plan), "mk_ring_attention_plan", context_.comm);
    }
    return plan;
  }

  void check(int set, Pattern pattern, Check& result) override {
    const int64_t max_products =
        kMaxReferenceProducts / (context_.device->matrices ? static_cast<int64_t>(sets_.size()) : 1);
    std::vector<int64_t> positions;
    for (int64_t row = 0; row < positions_.rows(); ++row) positions.push_back(positions_.of_row(row));
    const AttentionReference reference = attention_reference(inputs(set), positions, backward_, max_products);
    result.whole = reference.whole;
    result.relative_error_limit = relative_error_limit(context_.dtypes.dtype);
    const std::vector<DeviceMatrix> all = outputs(set);
    if (backward_) {
      check_tensor("dq", all[0], reference.query_rows, reference.dq, pattern, result);
      check_tensor("dk", all[1], reference.key_rows, reference.dk, pattern, result);
      check_tensor("dv", all[2], reference.key_rows, reference.dv, pattern, result);
    } else {
      check_tensor("o", all[0], reference.query_rows, reference.o, pattern, result);
      check_lse(all[1], reference, result);
    }
  }

  uint64_t output_hash(int set) override {
    uint64_t hash = 0;
    for (const DeviceMatrix& output : outputs(set)) {
      if (context_.device->matrices) {
        hash = index_hash(hash, context_.device->matrices->scan(output).hash, 0);
        continue;
      }
      download(output);
      for (size_t offset = 0; offset < staging_.size(); offset += 8) {
        uint64_t word = 0;
        std::memcpy(&word, staging_.data() + offset, std::min<size_t>(8, staging_.size() - offset));
        hash = index_hash(hash, word, offset);
      }
    }
    return hash;
  }

 private:
  size_t vectors(const char* heads) const {
    return static_cast<size_t>(shape_["batch"] * shape_[heads] * positions_.rows());
  }
  size_t query_bytes() const { return vectors("heads") * static_cast<size_t>(shape_["dim"]) * 2; }
  size_t key_bytes() const { return vectors("kv_heads") * static_cast<size_t>(shape_["dim"]) * 2; }
  size_t lse_bytes() const { return vectors("heads") * sizeof(float); }

  // What a launch writes, rows of dim elements; of lse rows of a head.
  std::vector<DeviceMatrix> outputs(int set) const {
    const Buffers& buffers = sets_[static_cast<size_t>(set)];
    const int64_t dim = shape_["dim"];
    const auto tensor = [&](const DeviceBuffer& buffer, const char* heads) {
      return DeviceMatrix{buffer.data(), context_.dtypes.dtype, static_cast<int64_t>(vectors(heads)), dim, dim};
    };
    if (backward_)
      return {tensor(buffers.dq, "heads"), tensor(buffers.dk, "kv_heads"), tensor(buffers.dv, "kv_heads")};
    const int64_t own = positions_.rows();
    return {tensor(buffers.o, "heads"),
            {buffers.lse.data(), MK_DTYPE_FP32, shape_["batch"] * shape_["heads"], own, own}};
  }

  static size_t bytes_of(const DeviceMatrix& matrix) {
    return static_cast<size_t>(matrix.rows * matrix.cols) * element_bytes(matrix.dtype);
  }

  AttentionInputs inputs(int set) const {
    return {shape_["batch"],
            shape_["seq"],
            static_cast<int>(shape_["heads"]),
            static_cast<int>(shape_["kv_heads"]),
            static_cast<int>(shape_["dim"]),
            shape_["causal"] != 0,
            patterns_.empty() ? Pattern::kRandom : patterns_[static_cast<size_t>(set)],
            context_.dtypes.dtype,
            0xa77 + 0x100 * static_cast<uint64_t>(set),
            attention_sequences(shape_).count};
  }

  template <typename Args>
  void set_common(Args& args, int set) const {
    const Buffers& buffers = sets_[static_cast<size_t>(set)];
    args.batch = shape_["batch"];
    args.seq = shape_["seq"];
    args.heads = static_cast<int32_t>(shape_["heads"]);
    args.kv_heads = static_cast<int32_t>(shape_["kv_heads"]);
    args.dim = static_cast<int32_t>(shape_["dim"]);
    args.causal = shape_["zigzag"]   ? MK_CAUSAL_ZIGZAG
                  : shape_["causal"] ? MK_CAUSAL_CONTIGUOUS
                                     : MK_CAUSAL_NONE;
    args.dtype = context_.dtypes.dtype;
    if (cu_seqlens_) {
      args.num_sequences = static_cast<int32_t>(shape_["packed"]);
      args.cu_seqlens = static_cast<const int32_t*>(cu_seqlens_->data());
    }
    args.softmax_scale = inputs(set).scale();
    args.q = buffers.q.data();
    args.k = buffers.k.data();
    args.v = buffers.v.data();
  }

  mk_ring_attention_args_t forward_args(int set) const {
    mk_ring_attention_args_t args = MK_RING_ATTENTION_ARGS_INIT;
    set_common(args, set);
    args.o = sets_[static_cast<size_t>(set)].o.data();
    args.lse = static_cast<float*>(sets_[static_cast<size_t>(set)].lse.data());
    return args;
  }

  mk_ring_attention_backward_args_t backward_args(int set) const {
    const Buffers& buffers = sets_[static_cast<size_t>(set)];
    mk_ring_attention_backward_args_t args = MK_RING_ATTENTION_BACKWARD_ARGS_INIT;
    set_common(args, set);
    args.o = buffers.o.data();
    args.lse = static_cast<const float*>(buffers.lse.data());
    args.d_o = buffers.d_o.data();
    args.dq = buffers.dq.data();
    args.dk = buffers.dk.data();
    args.dv = buffers.dv.data();
    return args;
  }

  void run_forward(int set) const {
    const mk_ring_attention_args_t args = forward_args(set);
    require(mk_ring_attention(context_.comm, &args, context_.device->stream()), "mk_ring_attention",
            context_.comm);
  }

  void fill_tensor(const DeviceBuffer& buffer, const AttentionInputs& in, AttentionTensor tensor) {
    if (context_.device->matrices)
      return context_.device->matrices->fill_attention(buffer.data(), in, tensor, positions_);
    staging_.resize(buffer.bytes());
    int64_t at = 0;
    for (int64_t b = 0; b < in.batch; ++b) {
      for (int64_t row = 0; row < positions_.rows(); ++row) {
        for (int head = 0; head < in.heads_of(tensor); ++head) {
          for (int d = 0; d < in.dim; ++d)
            store_element(in.dtype, staging_.data(), at++,
                          in.unrounded(tensor, b, positions_.of_row(row), head, d));
        }
      }
    }
    buffer.upload(staging_.data());
  }

  void download(const DeviceMatrix& matrix) {
    staging_.resize(bytes_of(matrix));
    if (!staging_.empty()) context_.device->download(staging_.data(), matrix.data, staging_.size());
  }

  // The rows alone, one below the other.
  void download(const DeviceMatrix& matrix, const std::vector<int64_t>& rows) {
    if (static_cast<int64_t>(rows.size()) == matrix.rows) return download(matrix);
    const size_t row_bytes = static_cast<size_t>(matrix.cols) * element_bytes(matrix.dtype);
    staging_.resize(row_bytes * rows.size());
    for (size_t row = 0; row < rows.size(); ++row) {
      context_.device->download(
          staging_.data() + row * row_bytes,
          static_cast<const char*>(matrix.data) + static_cast<size_t>(rows[row]) * row_bytes, row_bytes);
    }
  }

  // "" where every element was written.
  std::string scanned(const DeviceMatrix& matrix) const {
    const MatrixScan scan = context_.device->matrices->scan(matrix);
    if (scan.first_bad < 0) return "";
    return "row " + std::to_string(scan.first_bad / matrix.cols) + ", column " +
           std::to_string(scan.first_bad % matrix.cols) + ": never written, or not finite";
  }

  Comparison compared(const DeviceMatrix& matrix, const std::vector<int64_t>& rows,
                      const std::vector<double>& reference, bool integers) {
    Sample sample;
    sample.rows = rows;
    sample.cols.resize(static_cast<size_t>(matrix.cols));
    std::iota(sample.cols.begin(), sample.cols.end(), 0);
    if (!context_.device->matrices) {
      download(matrix);
      return compare({staging_.data(), matrix.dtype, matrix.rows, matrix.cols, matrix.cols}, sample, reference,
                     integers);
    }
    const std::string unwritten = scanned(matrix);
    download(matrix, rows);
    std::iota(sample.rows.begin(), sample.rows.end(), 0);
    const auto num_rows = static_cast<int64_t>(rows.size());
    Comparison comparison = compare({staging_.data(), matrix.dtype, num_rows, matrix.cols, matrix.cols}, sample,
                                    reference, integers);
    if (unwritten.empty()) return comparison;
    comparison.complete = false;
    comparison.problem = unwritten;
    return comparison;
  }

  void check_tensor(const char* name, const DeviceMatrix& matrix, const std::vector<int64_t>& rows,
                    const std::vector<double>& reference, Pattern pattern, Check& result) {
    const bool integers = pattern == Pattern::kIntegers;
    const Comparison comparison = compared(matrix, rows, reference, integers);
    result.complete = result.complete && comparison.complete;
    if (integers) {
      result.exact = result.exact && comparison.exact;
    } else {
      result.relative_error = std::max(result.relative_error, comparison.relative_error());
    }
    if (result.problem.empty() && !comparison.problem.empty())
      result.problem =
          std::string(integers ? "integer inputs: " : "random inputs: ") + name + ": " + comparison.problem;
  }

  // lse is [batch][heads][row]; it is part of the result as a whole, whatever the inputs.
  void check_lse(const DeviceMatrix& lse, const AttentionReference& reference, Check& result) {
    const auto note = [&](const std::string& problem) {
      result.complete = false;
      if (result.problem.empty()) result.problem = "lse" + problem;
    };
    if (context_.device->matrices) {
      const std::string unwritten = scanned(lse);
      if (!unwritten.empty()) note(", " + unwritten);
    }
    download(lse);
    for (size_t at = 0; at < reference.query_rows.size(); ++at) {
      const int64_t row = reference.query_rows[at];
      const int64_t head = row % shape_["heads"];
      const int64_t b = row / shape_["heads"] / lse.cols;
      const int64_t place = (b * shape_["heads"] + head) * lse.cols + row / shape_["heads"] % lse.cols;
      const double seen = load_element(MK_DTYPE_FP32, staging_.data(), place);
      const double expected = reference.lse[at];
      if (std::fabs(seen - expected) <= kLseErrorLimit * std::max(1.0, std::fabs(expected))) continue;
      note("[" + std::to_string(place) + "]: expected " + std::to_string(expected) + ", saw " +
           std::to_string(seen));
    }
  }

  bool backward_;
  Context context_;
  Shape shape_;
  AttentionPositions positions_;
  std::vector<Pattern> patterns_;  // of the inputs of each set
  std::vector<Buffers> sets_;
  std::optional<DeviceBuffer> cu_seqlens_;  // packed
  std::vector<unsigned char> staging_;
};

void validate(const Shape& shape, int) {
  const std::string where = "--shape \"" + shape.text() + "\": ";
  if (shape["heads"] % shape["kv_heads"]) throw UsageError(where + "kv_heads does not divide heads");
  if (shape["zigzag"] && !shape["causal"]) throw UsageError(where + "zigzag=1 needs causal=1");
  if (shape["packed"] && shape["batch"] != 1) throw UsageError(where + "packed sequences need batch=1");
  if (shape["packed"] && shape["seq"] > INT32_MAX)
    throw UsageError(where + "packed sequences need a seq of 31 bits");
  if (shape["dim"] % 8) throw UsageError(where + "dim is not a multiple of 8");
  if (shape["dim"] < 40 && shape["seq"] > int64_t{1} << shape["dim"])
    throw UsageError(where + "seq is more than 2^dim, which the check's inputs tell apart");
}

template <typename Args>
mk_status_t ask(const Context& context, Args args, mk_status_t (*plan_of)(mk_comm_t, const Args*, mk_plan_t*)) {
  mk_plan_t plan = MK_PLAN_INIT;
  args.batch = 1;
  args.seq = 128;
  args.heads = args.kv_heads = 1;
  args.dim = 64;
  args.dtype = context.dtypes.dtype;
  return plan_of(context.comm, &args, &plan);
}

const ShapeKeys kKeys = {{"batch"},
                         {"seq"},
                         {"heads", 1, 1 << 20},
                         {"kv_heads", 1, 1 << 20},
                         {"dim", 1, 1024},
                         {"causal", 0, 1, 0},
                         {"zigzag", 0, 1, 0},
                         {"packed", 0, kMostSequences, 0}};

}  // namespace

const Operator kRingAttention = {"ring_attention",
                                 kKeys,
                                 [](const Context& context) {
                                   return ask<mk_ring_attention_args_t>(context, MK_RING_ATTENTION_ARGS_INIT,
                                                                        mk_ring_attention_plan);
                                 },
                                 validate,
                                 [](const Context& context, const Shape& shape) -> std::unique_ptr<Problem> {
                                   return std::make_unique<AttentionProblem>(false, context, shape);
                                 },
                                 true,
                                 attention_alone_shape};

const Operator kRingAttentionBackward = {
    "ring_attention_backward",
    kKeys,
    [](const Context& context) {
      return ask<mk_ring_attention_backward_args_t>(context, MK_RING_ATTENTION_BACKWARD_ARGS_INIT,
                                                    mk_ring_attention_backward_plan);
    },
    validate,
    [](const Context& context, const Shape& shape) -> std::unique_ptr<Problem> {
      return std::make_unique<AttentionProblem>(true, context, shape);
    },
    true,
    attention_alone_shape};

}  // namespace perf
