// SPDX-License-Identifier: MIT
#include "kernels/ops/allgather_gemm/cuda_split_kernel.cuh"

namespace mk::allgather_gemm {

const SplitTable& split_kernels_bf16() { return split_kernel_table<__nv_bfloat16>(); }

}  // namespace mk::allgather_gemm
