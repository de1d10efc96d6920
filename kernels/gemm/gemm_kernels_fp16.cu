// SPDX-License-Identifier: MIT
#include "kernels/gemm/gemm_kernel.cuh"

namespace mk {

const GemmKernelTable& gemm_kernels_fp16() { return gemm_kernel_table<__half, false>(); }

}  // namespace mk
