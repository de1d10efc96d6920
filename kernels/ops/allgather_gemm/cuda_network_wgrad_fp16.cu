// SPDX-License-Identifier: MIT
#include "kernels/ops/allgather_gemm/cuda_network_wgrad.cuh"

namespace mk::allgather_gemm {

const NetworkWgradTable& network_wgrad_kernels_fp16() { return network_wgrad_kernel_table<__half>(); }

}  // namespace mk::allgather_gemm
