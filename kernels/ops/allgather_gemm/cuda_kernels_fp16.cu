// SPDX-License-Identifier: MIT
#include "kernels/ops/allgather_gemm/cuda_kernel.cuh"

namespace mk::allgather_gemm {

const CudaTable& cuda_kernels_fp16() { return cuda_kernel_table<__half>(); }

}  // namespace mk::allgather_gemm
