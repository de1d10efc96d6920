// SPDX-License-Identifier: MIT
#include "kernels/gemm/gemm_split_kernel.cuh"

namespace mk {

const GemmSplitKernelTable& gemm_split_kernels_bf16() { return gemm_split_kernel_table<__nv_bfloat16>(); }

}  // namespace mk
