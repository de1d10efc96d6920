// SPDX-License-Identifier: MIT
#include "kernels/cuda/rank_gemm_launch.h"

#include <algorithm>

#include "kernels/gemm/tensor_map.h"
#include "kernels/ops/allgather_gemm/cuda_launch.h"
#include "kernels/ops/gemm_reduce_scatter/cuda_launch.h"

namespace mk {

cudaError_t rank_gemm_prepare(bool between_nodes) {
  cudaError_t error = tensor_map_prepare();
  if (error == cudaSuccess) error = allgather_gemm::cuda_prepare(between_nodes);
  if (error == cudaSuccess) error = gemm_reduce_scatter::cuda_prepare(between_nodes);
  return error;
}

void RankGemmLaunch::fill(const LaunchDetails& details, RankComm* comm) {
  comm->trace = details.trace;
  comm->ticket = details.ticket;
  comm->entry.output_offset = details.output_offset;
  comm->entry.output_ld = details.output_ld;
  std::copy(std::begin(details.outputs), std::end(details.outputs), comm->outputs);
}

std::unique_ptr<RankGemmLaunch> RankGemmLaunch::make(const GemmCall& call, const RankGemmPlan& plan,
                                                     const RankComm& comm) {
  if (!tensor_map_is_prepared()) return nullptr;
  return call.op == MK_OPERATOR_ALLGATHER_GEMM ? allgather_gemm::make_cuda_launch(call, plan, comm)
                                               : gemm_reduce_scatter::make_cuda_launch(call, plan, comm);
}

}  // namespace mk
