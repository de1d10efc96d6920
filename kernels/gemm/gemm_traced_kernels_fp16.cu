// SPDX-License-Identifier: MIT
#include "kernels/gemm/gemm_kernel.cuh"

namespace mk {

const GemmKernelTable& gemm_traced_kernels_fp16() { return gemm_kernel_table<__half, true>(); }

}  // namespace mk
