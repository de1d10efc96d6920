// SPDX-License-Identifier: MIT
#include "kernels/gemm/gemm_split_kernel.cuh"

namespace mk {

const GemmPairKernelTable& gemm_pair_kernels_fp16() { return gemm_pair_kernel_table<__half>(); }

}  // namespace mk
