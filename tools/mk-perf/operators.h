// SPDX-License-Identifier: MIT
// The operators that mk-perf measures. An operator is one file: it says its sizes, allocates, fills, runs and
// checks.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "device.h"
#include "expert_exchange.h"
#include "input_matrix.h"
#include "mkernel.h"
#include "shape.h"

namespace perf {

struct Dtypes {
  mk_dtype_t dtype = MK_DTYPE_BF16;
  mk_dtype_t out_dtype = MK_DTYPE_BF16;
  mk_dtype_t comm_dtype = MK_DTYPE_BF16;
};

// The rank that a problem is run by.
struct Context {
  mk_comm_t comm = nullptr;
  int rank = 0;
  int nranks = 1;
  const DeviceOperations* device = nullptr;
  Dtypes dtypes;
  mk_layout_t b_layout = MK_LAYOUT_KN;  // of the GEMM operators
  bool symmetric = false;               // outputs that peers write, where they may, lie in symmetric memory
  bool accumulate = false;              // the GEMM operators add to the C that is there
};

enum class Collective { kAllGather, kReduceScatter, kAllReduce };

// The pair of collective and product that a GEMM operator stands in for. m, n, k, and leading dimensions are
// those of the operator's arguments.
struct UnfusedShape {
  Collective collective = Collective::kAllGather;
  bool is_wgrad = false;  // C[k, n] = dY[m, k]^T X[m, n], and X is what is gathered
  int64_t m = 0;
  int64_t n = 0;
  int64_t k = 0;
  int64_t lda = 0;
  int64_t ldb = 0;
  int64_t ldc = 0;
  mk_layout_t b_layout = MK_LAYOUT_KN;
  bool accumulate = false;
  Dtypes dtypes;
};

struct Operands {
  const void* a = nullptr;
  const void* b = nullptr;
  void* c = nullptr;
};

// The exchange of rows and the grouped product that an expert operator stands in for; all matrices are packed,
// the weights [local experts, inner dimension, columns].
struct UnfusedExperts {
  bool combines = false;  // the product comes first
  int64_t hidden = 0;
  int64_t inter = 0;
  int topk = 1;
  Dtypes dtypes;
  ExpertExchange exchange;

  int64_t product_inner() const { return combines ? inter : hidden; }
  int64_t product_columns() const { return combines ? hidden : inter; }
};

struct ExpertOperands {
  const void* rows = nullptr;  // dispatch: this rank's tokens; combine: its expert rows
  const void* w = nullptr;
  const float* factors = nullptr;  // combine: [tokens, topk]
  void* y = nullptr;
};

struct Check {
  bool exact = true;          // integers: equal to the last bit
  bool complete = true;       // every element written, none beyond
  bool same_bits = true;      // repeated launches agree
  double relative_error = 0;  // random inputs
  double relative_error_limit = 0;
  bool whole = true;    // every element was compared, not a sample
  std::string problem;  // the first thing wrong on this rank, "" when all is well

  bool passed() const { return exact && complete && same_bits && relative_error <= relative_error_limit; }
};

// One shape of one operator on one rank, with several sets of buffers to rotate through.
class Problem {
 public:
  virtual ~Problem() = default;
  virtual double flops() const = 0;          // of this rank, a launch
  virtual size_t bytes_per_set() const = 0;  // of device memory
  virtual void allocate(int num_sets) = 0;
  // Fills the inputs, differently for each set, and poisons the output.
  virtual void fill(int set, Pattern pattern) = 0;
  // An output that is added to gets what it had after fill.
  virtual void poison(int set) = 0;
  virtual void run(int set) = 0;  // enqueues
  // Compares the output of a completed launch with the reference for what fill put in.
  virtual void check(int set, Pattern pattern, Check& result) = 0;
  // Of all bits of the output, padding excluded.
  virtual uint64_t output_hash(int set) = 0;
  // nullopt: mk-perf knows of no such pair.
  virtual std::optional<UnfusedShape> unfused() const { return std::nullopt; }
  virtual Operands operands(int) const { return {}; }  // of a set, on the device
  // The same of an expert operator.
  virtual std::optional<UnfusedExperts> unfused_experts() const { return std::nullopt; }
  virtual ExpertOperands expert_operands(int) const { return {}; }
  // That the busiest rank moves to or from others, however the operator goes about it; all ranks on one node.
  virtual std::optional<double> link_bytes() const { return std::nullopt; }
  // What the library says of a launch; nullopt where nobody asks.
  virtual std::optional<mk_plan_t> plan() const { return std::nullopt; }
  // This rank's product for one rank by itself; nullptr where there is no such thing.
  virtual std::unique_ptr<Problem> alone(const Context&) const { return nullptr; }
};

// What one rank by itself is timed with, and what its time is multiplied by.
struct AloneShape {
  Shape shape;
  double factor = 1;
};

struct Operator {
  const char* name;
  ShapeKeys keys;
  // What the library answers to a small call: MK_ERROR_UNSUPPORTED, leaving a sentence, where it has no such
  // operator.
  mk_status_t (*availability)(const Context& context);
  // A UsageError for a shape that passes the keys' ranges but makes no sense. May be nullptr.
  void (*validate)(const Shape& shape, int nranks);
  // nullptr: mk-perf cannot run it yet.
  std::unique_ptr<Problem> (*make)(const Context& context, const Shape& shape);
  // Is one rank by itself timed, too, with the work of a rank among many (Problem::alone)?
  bool alone_comparable = true;
  // That work, where no shape has exactly as much. May be nullptr.
  AloneShape (*alone_shape)(const Shape& shape, int nranks) = nullptr;
  // The shape that moves as much with next to no product. May be nullptr.
  Shape (*collective_shape)(const Shape& shape) = nullptr;
  bool can_accumulate = false;  // Context::accumulate
};

extern const Operator kAllgatherGemm;
extern const Operator kAllgatherGemmWgrad;
extern const Operator kGemmReduceScatter;
extern const Operator kGemmAllreduce;
extern const Operator kMoeDispatchGemm;
extern const Operator kMoeGemmCombine;
extern const Operator kRingAttention;
extern const Operator kRingAttentionBackward;

const std::vector<const Operator*>& all_operators();

// nullptr: no such operator.
const Operator* find_operator(const std::string& name);

}  // namespace perf
