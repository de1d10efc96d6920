// SPDX-License-Identifier: MIT
// Launches the mixture-of-experts operators on the GPUs of one node.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/cuda/moe_plan.h"
#include "kernels/device/rank_comm.h"

namespace mk {

// As rank_gemm_prepare().
cudaError_t moe_prepare();

// Enqueues exactly one kernel, as rank_gemm_launch().
cudaError_t moe_launch(const MoeCall& call, const MoePlan& plan, const RankComm& comm, cudaStream_t stream);

}  // namespace mk
