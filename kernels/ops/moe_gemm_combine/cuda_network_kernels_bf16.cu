// SPDX-License-Identifier: MIT
#include "kernels/ops/moe_gemm_combine/cuda_network_kernel.cuh"

namespace mk::moe_gemm_combine {

const NetworkTable& cuda_network_kernels_bf16() { return cuda_network_kernel_table<__nv_bfloat16>(); }

}  // namespace mk::moe_gemm_combine
