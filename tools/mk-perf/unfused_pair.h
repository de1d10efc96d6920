// SPDX-License-Identifier: MIT
// The baseline: what a call site does without libmkernel, an NCCL collective and a product of cuBLAS.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "operators.h"
#include "rank_group.h"

namespace perf {

// One shape, on the inputs of the fused operator and with outputs of its own. Each run enqueues one CUDA graph,
// so that the launches of its parts are not held against it. m is padded to a multiple of the ranks where it is
// none.
class UnfusedPair {
 public:
  virtual ~UnfusedPair() = default;
  virtual void run_pair(int set) = 0;
  virtual void run_product(int set) = 0;     // alone
  virtual void run_collective(int set) = 0;  // alone
  // Of what it chose among several ways, "" where there is one.
  virtual std::string description() const { return {}; }
  // Its own output gets what the fused operator's has, for both to add to.
  virtual void take_output(int) {}
  // The output of run_pair beside that of the fused operator, over this rank's rows.
  virtual MatrixDifference difference(int set) = 0;
};

class UnfusedLibraries {
 public:
  virtual ~UnfusedLibraries() = default;
  virtual std::string nccl_version() const = 0;
  virtual std::string cublaslt_version() const = 0;
  // Called by all ranks. nullptr, and why in `problem`, where the pair does not do what the operator does.
  virtual std::unique_ptr<UnfusedPair> make_pair(const UnfusedShape& shape, const std::vector<Operands>& sets,
                                                 std::string& problem) = 0;
  // The same for an expert operator.
  virtual std::unique_ptr<UnfusedPair> make_experts(const UnfusedExperts& experts,
                                                    const std::vector<ExpertOperands>& sets,
                                                    std::string& problem) = 0;
};

struct UnfusedPaths {
  std::string nccl;      // "": where the loader finds it
  std::string cublaslt;  // likewise
};

// Called by all ranks, which get all the same: nullptr, and why in `problem`, where NCCL or cublasLt is not
// there on every rank. A RunError when they are and do not work.
std::unique_ptr<UnfusedLibraries> load_unfused_libraries(const Context& context, RankGroup& group,
                                                         const UnfusedPaths& paths, std::string& problem);

}  // namespace perf
