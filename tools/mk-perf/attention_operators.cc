// SPDX-License-Identifier: MIT
// Ring attention and its gradients: one attention over the whole sequence, of which each rank holds its slices.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "attention_reference.h"
#include "element.h"
#include "errors.h"
#include "operators.h"
#include "reference.h"

namespace perf {
namespace {

// About a quarter of a second of reference a set and pattern.
constexpr int64_t kMaxReferenceProducts = int64_t{1} << 27;
constexpr double kLseErrorLimit = 1e-4;

std::vector<int64_t> slice(int64_t seq, int64_t parts, int64_t part) {
  const int64_t length = (seq + parts - 1) / parts;
  std::vector<int64_t> positions;
  for (int64_t at = part * length; at < std::min(seq, (part + 1) * length); ++at) positions.push_back(at);
  return positions;
}

// The slices of mkernel.h: slice r of W, or with zigzag slices r and 2W-1-r of 2W.
std::vector<int64_t> positions_of(const Shape& shape, int rank, int nranks) {
  if (!shape["zigzag"]) return slice(shape["seq"], nranks, rank);
  std::vector<int64_t> positions = slice(shape["seq"], 2 * nranks, rank);
  const std::vector<int64_t> more = slice(shape["seq"], 2 * nranks, 2 * nranks - 1 - rank);
  positions.insert(positions.end(), more.begin(), more.end());
  return positions;
}

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
        positions_(positions_of(shape, context.rank, context.nranks)) {}

  // Two products a pair of query and key forward, five backward: recomputing the weights is not counted.
  double flops() const override {
    double pairs = 0;
    for (const int64_t position : positions_) pairs += static_cast<double>(inputs(0).num_visible(position));
    return (backward_ ? 10 : 4) * pairs *
           static_cast<double>(shape_["batch"] * shape_["heads"] * shape_["dim"]);
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
  }

  void fill(int set, Pattern pattern) override {
    patterns_[static_cast<size_t>(set)] = pattern;
    const AttentionInputs in = inputs(set);
    const Buffers& buffers = sets_[static_cast<size_t>(set)];
    fill_tensor(buffers.q, in.heads, [&](auto... at) { return in.q(at...); });
    fill_tensor(buffers.k, in.kv_heads, [&](auto... at) { return in.k(at...); });
    fill_tensor(buffers.v, in.kv_heads, [&](auto... at) { return in.v(at...); });
    if (backward_) {
      fill_tensor(buffers.d_o, in.heads, [&](auto... at) { return in.d_o(at...); });
      // What the gradients are given: all ranks are here together.
      run_forward(set);
      require(mk_comm_synchronize(context_.comm, context_.device->stream()), "mk_comm_synchronize",
              context_.comm);
    }
    poison(set);
  }

  void poison(int set) override {
    const Buffers& buffers = sets_[static_cast<size_t>(set)];
    const auto spoil = [&](const DeviceBuffer& buffer, mk_dtype_t dtype) {
      staging_.resize(buffer.bytes());
      poison_elements(dtype, staging_.data(), static_cast<int64_t>(buffer.bytes() / element_bytes(dtype)));
      buffer.upload(staging_.data());
    };
    const mk_dtype_t dtype = context_.dtypes.dtype;
    if (backward_) {
      for (const auto* buffer : {&buffers.dq, &buffers.dk, &buffers.dv}) spoil(*buffer, dtype);
    } else {
      spoil(buffers.o, dtype);
      spoil(buffers.lse, MK_DTYPE_FP32);
    }
  }

  void run(int set) override {
    if (!backward_) return run_forward(set);
    const Buffers& buffers = sets_[static_cast<size_t>(set)];
    mk_ring_attention_backward_args_t args = MK_RING_ATTENTION_BACKWARD_ARGS_INIT;
    set_common(args, set);
    args.o = buffers.o.data();
    args.lse = static_cast<const float*>(buffers.lse.data());
    args.d_o = buffers.d_o.data();
    args.dq = buffers.dq.data();
    args.dk = buffers.dk.data();
    args.dv = buffers.dv.data();
    require(mk_ring_attention_backward(context_.comm, &args, context_.device->stream()),
            "mk_ring_attention_backward", context_.comm);
  }

  void check(int set, Pattern pattern, Check& result) override {
    const AttentionReference reference =
        attention_reference(inputs(set), positions_, backward_, kMaxReferenceProducts);
    const Buffers& buffers = sets_[static_cast<size_t>(set)];
    result.whole = reference.whole;
    result.relative_error_limit = relative_error_limit(context_.dtypes.dtype);
    if (backward_) {
      check_tensor("dq", buffers.dq, shape_["heads"], reference.query_rows, reference.dq, pattern, result);
      check_tensor("dk", buffers.dk, shape_["kv_heads"], reference.key_rows, reference.dk, pattern, result);
      check_tensor("dv", buffers.dv, shape_["kv_heads"], reference.key_rows, reference.dv, pattern, result);
    } else {
      check_tensor("o", buffers.o, shape_["heads"], reference.query_rows, reference.o, pattern, result);
      check_lse(buffers.lse, reference, result);
    }
  }

  uint64_t output_hash(int set) override {
    const Buffers& buffers = sets_[static_cast<size_t>(set)];
    uint64_t hash = 0;
    const auto add = [&](const DeviceBuffer& buffer) {
      download(buffer);
      for (size_t offset = 0; offset < staging_.size(); offset += 8) {
        uint64_t word = 0;
        std::memcpy(&word, staging_.data() + offset, std::min<size_t>(8, staging_.size() - offset));
        hash = index_hash(hash, word, offset);
      }
    };
    if (backward_) {
      for (const auto* buffer : {&buffers.dq, &buffers.dk, &buffers.dv}) add(*buffer);
    } else {
      add(buffers.o);
      add(buffers.lse);
    }
    return hash;
  }

 private:
  size_t vectors(const char* heads) const {
    return static_cast<size_t>(shape_["batch"] * shape_[heads]) * positions_.size();
  }
  size_t query_bytes() const { return vectors("heads") * static_cast<size_t>(shape_["dim"]) * 2; }
  size_t key_bytes() const { return vectors("kv_heads") * static_cast<size_t>(shape_["dim"]) * 2; }
  size_t lse_bytes() const { return vectors("heads") * sizeof(float); }

  AttentionInputs inputs(int set) const {
    return {shape_["batch"],
            shape_["seq"],
            static_cast<int>(shape_["heads"]),
            static_cast<int>(shape_["kv_heads"]),
            static_cast<int>(shape_["dim"]),
            shape_["causal"] != 0,
            patterns_.empty() ? Pattern::kRandom : patterns_[static_cast<size_t>(set)],
            context_.dtypes.dtype,
            0xa77 + 0x100 * static_cast<uint64_t>(set)};
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
    args.softmax_scale = inputs(set).scale();
    args.q = buffers.q.data();
    args.k = buffers.k.data();
    args.v = buffers.v.data();
  }

  void run_forward(int set) const {
    mk_ring_attention_args_t args = MK_RING_ATTENTION_ARGS_INIT;
    set_common(args, set);
    args.o = sets_[static_cast<size_t>(set)].o.data();
    args.lse = static_cast<float*>(sets_[static_cast<size_t>(set)].lse.data());
    require(mk_ring_attention(context_.comm, &args, context_.device->stream()), "mk_ring_attention",
            context_.comm);
  }

  template <typename Value>
  void fill_tensor(const DeviceBuffer& buffer, int heads, Value value) {
    staging_.resize(buffer.bytes());
    int64_t at = 0;
    for (int64_t b = 0; b < shape_["batch"]; ++b) {
      for (const int64_t position : positions_) {
        for (int head = 0; head < heads; ++head) {
          for (int d = 0; d < shape_["dim"]; ++d)
            store_element(context_.dtypes.dtype, staging_.data(), at++, value(b, position, head, d));
        }
      }
    }
    buffer.upload(staging_.data());
  }

  void download(const DeviceBuffer& buffer) {
    staging_.resize(buffer.bytes());
    buffer.download(staging_.data());
  }

  void check_tensor(const char* name, const DeviceBuffer& buffer, int64_t heads,
                    const std::vector<int64_t>& rows, const std::vector<double>& reference, Pattern pattern,
                    Check& result) {
    download(buffer);
    const int64_t dim = shape_["dim"];
    const int64_t all = shape_["batch"] * static_cast<int64_t>(positions_.size()) * heads;
    Sample sample;
    sample.rows = rows;
    sample.cols.resize(static_cast<size_t>(dim));
    std::iota(sample.cols.begin(), sample.cols.end(), 0);
    const bool integers = pattern == Pattern::kIntegers;
    const Comparison comparison =
        compare({staging_.data(), context_.dtypes.dtype, all, dim, dim}, sample, reference, integers);
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
  void check_lse(const DeviceBuffer& buffer, const AttentionReference& reference, Check& result) {
    download(buffer);
    const auto own = static_cast<int64_t>(positions_.size());
    for (size_t at = 0; at < reference.query_rows.size(); ++at) {
      const int64_t row = reference.query_rows[at];
      const int64_t head = row % shape_["heads"];
      const int64_t b = row / shape_["heads"] / own;
      const int64_t place = (b * shape_["heads"] + head) * own + row / shape_["heads"] % own;
      const double seen = load_element(MK_DTYPE_FP32, staging_.data(), place);
      const double expected = reference.lse[at];
      if (std::fabs(seen - expected) <= kLseErrorLimit * std::max(1.0, std::fabs(expected))) continue;
      result.complete = false;
      if (result.problem.empty())
        result.problem = "lse[" + std::to_string(place) + "]: expected " + std::to_string(expected) + ", saw " +
                         std::to_string(seen);
    }
  }

  bool backward_;
  Context context_;
  Shape shape_;
  std::vector<int64_t> positions_;
  std::vector<Pattern> patterns_;  // of the inputs of each set
  std::vector<Buffers> sets_;
  std::vector<unsigned char> staging_;
};

void validate(const Shape& shape, int) {
  const std::string where = "--shape \"" + shape.text() + "\": ";
  if (shape["heads"] % shape["kv_heads"]) throw UsageError(where + "kv_heads does not divide heads");
  if (shape["zigzag"] && !shape["causal"]) throw UsageError(where + "zigzag=1 needs causal=1");
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
                         {"zigzag", 0, 1, 0}};

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
                                 false};

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
    false};

}  // namespace perf
