// SPDX-License-Identifier: MIT
#include "kernels/gemm/gemm_kernel.cuh"

namespace mk {

const GemmKernelTable& gemm_traced_kernels_bf16() { return gemm_kernel_table<__nv_bfloat16, true>(); }

}  // namespace mk
