// SPDX-License-Identifier: MIT
#pragma once

#include "kernels/cuda/rank_gemm_launch.h"

namespace mk::gemm_reduce_scatter {

cudaError_t cuda_prepare();
// As RankGemmLaunch::make; of the all-reduce, too.
std::unique_ptr<RankGemmLaunch> make_cuda_launch(const GemmCall& call, const RankGemmPlan& plan,
                                                 const RankComm& comm);

}  // namespace mk::gemm_reduce_scatter
