// SPDX-License-Identifier: MIT
#include "kernels/ops/allgather_gemm/cuda_swapped_kernel.cuh"

namespace mk::allgather_gemm {

const SwappedTable& swapped_kernels_bf16() { return swapped_kernel_table<__nv_bfloat16>(); }

}  // namespace mk::allgather_gemm
