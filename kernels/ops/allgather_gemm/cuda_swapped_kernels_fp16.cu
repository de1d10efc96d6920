// SPDX-License-Identifier: MIT
#include "kernels/ops/allgather_gemm/cuda_swapped_kernel.cuh"

namespace mk::allgather_gemm {

const SwappedTable& swapped_kernels_fp16() { return swapped_kernel_table<__half>(); }

}  // namespace mk::allgather_gemm
