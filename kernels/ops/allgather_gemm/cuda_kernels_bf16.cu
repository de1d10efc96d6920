// SPDX-License-Identifier: MIT
#include "kernels/ops/allgather_gemm/cuda_kernel.cuh"

namespace mk::allgather_gemm {

const CudaTable& cuda_kernels_bf16() { return cuda_kernel_table<__nv_bfloat16>(); }

}  // namespace mk::allgather_gemm
