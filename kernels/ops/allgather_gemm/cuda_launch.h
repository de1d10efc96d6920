// SPDX-License-Identifier: MIT
#pragma once

#include "kernels/cuda/rank_gemm_launch.h"

namespace mk::allgather_gemm {

cudaError_t cuda_prepare();
// As RankGemmLaunch::make.
std::unique_ptr<RankGemmLaunch> make_cuda_launch(const GemmCall& call, const RankGemmPlan& plan,
                                                 const RankComm& comm);

}  // namespace mk::allgather_gemm
