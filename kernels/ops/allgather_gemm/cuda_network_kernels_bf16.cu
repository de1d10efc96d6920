// SPDX-License-Identifier: MIT
#include "kernels/ops/allgather_gemm/cuda_network_kernel.cuh"

namespace mk::allgather_gemm {

const NetworkTable& cuda_network_kernels_bf16() { return cuda_network_kernel_table<__nv_bfloat16>(); }

}  // namespace mk::allgather_gemm
