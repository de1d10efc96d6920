// SPDX-License-Identifier: MIT
#include "kernels/ops/allgather_gemm/cuda_split_kernel.cuh"

namespace mk::allgather_gemm {

const SplitTable& split_kernels_fp16() { return split_kernel_table<__half>(); }

}  // namespace mk::allgather_gemm
