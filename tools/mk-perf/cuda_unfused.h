// SPDX-License-Identifier: MIT
// What the baselines of all operators have in common on GPUs.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cublas_library.h"
#include "cublaslt_library.h"
#include "cuda_graph.h"
#include "nccl_library.h"
#include "unfused_pair.h"

namespace perf {

// NCCL connects all pairs of ranks in this time, also on a host that has much else to do.
constexpr std::chrono::seconds kNcclDeadline{90};

struct UnfusedTools {
  const NcclLibrary& nccl;
  const CublasLtLibrary& cublaslt;
  const CublasLibrary* cublas;  // nullptr: not found
  ncclComm_t comm;
};

// The three graphs of each set of buffers.
class CapturedPair : public UnfusedPair {
 public:
  CapturedPair(const UnfusedTools& tools, const Context& context) : tools_(tools), context_(context) {}

  void run_pair(int set) override { pairs_[static_cast<size_t>(set)].launch(stream()); }
  void run_product(int set) override { products_[static_cast<size_t>(set)].launch(stream()); }
  void run_collective(int set) override { collectives_[static_cast<size_t>(set)].launch(stream()); }

 protected:
  using Enqueue = std::function<void()>;

  cudaStream_t stream() const { return context_.device->stream(); }
  void synchronize() const { require_cuda(cudaStreamSynchronize(stream()), "running NCCL and cuBLAS"); }
  // Of the next set.
  void capture(const Enqueue& pair, const Enqueue& product, const Enqueue& collective) {
    collectives_.emplace_back(stream(), collective);
    products_.emplace_back(stream(), product);
    pairs_.emplace_back(stream(), pair);
  }

  UnfusedTools tools_;
  Context context_;

 private:
  std::vector<CudaGraph> pairs_;
  std::vector<CudaGraph> products_;
  std::vector<CudaGraph> collectives_;
};

// Called by all ranks.
std::unique_ptr<UnfusedPair> make_gemm_pair(const UnfusedTools& tools, const Context& context, RankGroup& group,
                                            const UnfusedShape& shape, const std::vector<Operands>& sets);
std::unique_ptr<UnfusedPair> make_expert_pair(const UnfusedTools& tools, const Context& context,
                                              RankGroup& group, const UnfusedExperts& experts,
                                              const std::vector<ExpertOperands>& sets);

}  // namespace perf
