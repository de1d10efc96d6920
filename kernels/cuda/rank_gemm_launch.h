// SPDX-License-Identifier: MIT
// Launches the GEMM operators of communicators of several ranks.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/cuda/rank_gemm_plan.h"
#include "kernels/device/rank_comm.h"

namespace mk {

// Loads the kernels on the current device; may synchronise. Once a device, before the first launch.
cudaError_t rank_gemm_prepare(bool between_nodes);

// Enqueues exactly one kernel of the plan's CTAs, which must be able to be resident together. `comm` is
// complete but for what is the call's. Allocates nothing, waits for nothing, may be captured.
cudaError_t rank_gemm_launch(const GemmCall& call, const RankGemmPlan& plan, const RankComm& comm,
                             cudaStream_t stream);

}  // namespace mk
