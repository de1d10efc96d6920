// SPDX-License-Identifier: MIT
#include "kernels/ops/allgather_gemm/cuda_wgrad.cuh"

namespace mk::allgather_gemm {

const WgradTable& wgrad_kernels_bf16() { return wgrad_kernel_table<__nv_bfloat16>(); }

}  // namespace mk::allgather_gemm
