// SPDX-License-Identifier: MIT
#include "kernels/ops/allgather_gemm/cuda_network_wgrad.cuh"

namespace mk::allgather_gemm {

const NetworkWgradTable& network_wgrad_kernels_bf16() { return network_wgrad_kernel_table<__nv_bfloat16>(); }

}  // namespace mk::allgather_gemm
