// SPDX-License-Identifier: MIT
#include "kernels/ops/allgather_gemm/cuda_wgrad.cuh"

namespace mk::allgather_gemm {

const WgradTable& wgrad_kernels_fp16() { return wgrad_kernel_table<__half>(); }

}  // namespace mk::allgather_gemm
