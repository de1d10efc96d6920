// SPDX-License-Identifier: MIT
#include "kernels/ops/moe_gemm_combine/cuda_kernel.cuh"

namespace mk::moe_gemm_combine {

const CudaTable& cuda_kernels_bf16() { return cuda_kernel_table<__nv_bfloat16>(); }

}  // namespace mk::moe_gemm_combine
