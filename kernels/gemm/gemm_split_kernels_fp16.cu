// SPDX-License-Identifier: MIT
#include "kernels/gemm/gemm_split_kernel.cuh"

namespace mk {

const GemmSplitKernelTable& gemm_split_kernels_fp16() { return gemm_split_kernel_table<__half>(); }

}  // namespace mk
