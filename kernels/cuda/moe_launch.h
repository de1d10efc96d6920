// SPDX-License-Identifier: MIT
// Launches the mixture-of-experts operators on GPUs.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/cuda/moe_plan.h"
#include "kernels/device/rank_comm.h"

namespace mk {

// Loads the kernels, as rank_gemm_prepare() does.
cudaError_t moe_prepare(bool is_between_nodes);

// Enqueues exactly one kernel, as RankGemmLaunch::enqueue() does.
cudaError_t moe_launch(const MoeCall& call, const MoePlan& plan, const RankComm& comm, cudaStream_t stream);

}  // namespace mk
