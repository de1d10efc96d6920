// SPDX-License-Identifier: MIT
#pragma once

#include "kernels/cuda/rank_gemm_launch.h"

namespace mk::gemm_reduce_scatter {

// As rank_gemm_prepare.
cudaError_t cuda_prepare(bool between_nodes);
// As RankGemmLaunch::make; of the all-reduce, too.
std::unique_ptr<RankGemmLaunch> make_cuda_launch(const GemmCall& call, const RankGemmPlan& plan,
                                                 const RankComm& comm);

}  // namespace mk::gemm_reduce_scatter
