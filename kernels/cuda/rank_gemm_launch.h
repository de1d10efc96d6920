// SPDX-License-Identifier: MIT
// Launches the GEMM operators of communicators of several ranks.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>

#include "kernels/cuda/rank_gemm_plan.h"
#include "kernels/device/rank_comm.h"

namespace mk {

// Loads the kernels on the current device; may synchronise. Once a device, before the first launch.
cudaError_t rank_gemm_prepare(bool between_nodes);

// What a launch says beside its call; as in RankComm.
struct LaunchDetails {
  TraceBuffer* trace = nullptr;
  uint64_t ticket = 0;
  uint64_t output_offset = kNoOutput;
  int64_t output_ld = 0;
  std::byte* outputs[MAX_GPU_RANKS] = {};
};

// Calls that differ in addresses only: their kernel, and its parameter but for these.
class RankGemmLaunch {
 public:
  // `comm` is complete but for what a launch sets. Null: no tensor map can be made of an operand.
  static std::unique_ptr<RankGemmLaunch> make(const GemmCall& call, const RankGemmPlan& plan,
                                              const RankComm& comm);
  virtual ~RankGemmLaunch() = default;

  // The output of a call that peers could write to straight away, if it lay in symmetric memory on all ranks.
  virtual PeerOutput peer_output(const GemmCall& call) const = 0;
  // Enqueues exactly one kernel of the plan's CTAs, which must be able to be resident together. Allocates
  // nothing, waits for nothing, may be captured. `call` is one of those that this was made for.
  virtual cudaError_t enqueue(const GemmCall& call, const LaunchDetails& details, cudaStream_t stream) = 0;

 protected:
  static void fill(const LaunchDetails& details, RankComm* comm);
};

}  // namespace mk
