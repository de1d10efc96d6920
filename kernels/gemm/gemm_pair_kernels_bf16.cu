// SPDX-License-Identifier: MIT
#include "kernels/gemm/gemm_split_kernel.cuh"

namespace mk {

const GemmPairKernelTable& gemm_pair_kernels_bf16() { return gemm_pair_kernel_table<__nv_bfloat16>(); }

}  // namespace mk
