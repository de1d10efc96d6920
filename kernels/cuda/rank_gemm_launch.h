// SPDX-License-Identifier: MIT
// Launches the GEMM operators of communicators of several ranks.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>

#include "kernels/cuda/rank_gemm_plan.h"
#include "kernels/device/rank_comm.h"

namespace mk {

// Loads the kernels on the current device; may synchronise. Once a device, before the first launch.
cudaError_t rank_gemm_prepare();

// Calls that differ in addresses only: their kernel, and its parameter but for these.
class RankGemmLaunch {
 public:
  // `comm` is complete but for what a launch sets. Null: no tensor map can be made of an operand.
  static std::unique_ptr<RankGemmLaunch> make(const GemmCall& call, const RankGemmPlan& plan,
                                              const RankComm& comm);
  virtual ~RankGemmLaunch() = default;

  // Enqueues exactly one kernel of the plan's CTAs, which must be able to be resident together. Allocates
  // nothing, waits for nothing, may be captured. `call` is one of those that this was made for; `trace` and
  // `ticket` as in RankComm.
  virtual cudaError_t enqueue(const GemmCall& call, TraceBuffer* trace, uint64_t ticket,
                              cudaStream_t stream) = 0;
};

}  // namespace mk
