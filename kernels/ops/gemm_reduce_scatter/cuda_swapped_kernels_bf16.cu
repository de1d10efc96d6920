// SPDX-License-Identifier: MIT
#include "kernels/ops/gemm_reduce_scatter/cuda_swapped_kernel.cuh"

namespace mk::gemm_reduce_scatter::swapped {

const SwappedTable& kernels_bf16() { return kernel_table<__nv_bfloat16>(); }

}  // namespace mk::gemm_reduce_scatter::swapped
