// SPDX-License-Identifier: MIT
#include "kernels/ops/gemm_reduce_scatter/cuda_network_kernel.cuh"

namespace mk::gemm_reduce_scatter {

const NetworkTable& cuda_network_kernels_bf16() { return cuda_network_kernel_table<__nv_bfloat16>(); }

}  // namespace mk::gemm_reduce_scatter
