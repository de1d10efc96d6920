// SPDX-License-Identifier: MIT
#include "kernels/ops/gemm_reduce_scatter/cuda_kernel.cuh"

namespace mk::gemm_reduce_scatter {

const CudaTable& cuda_kernels_bf16() { return cuda_kernel_table<__nv_bfloat16>(); }

}  // namespace mk::gemm_reduce_scatter
