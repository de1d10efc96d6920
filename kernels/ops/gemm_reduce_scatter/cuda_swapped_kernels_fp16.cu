// SPDX-License-Identifier: MIT
#include "kernels/ops/gemm_reduce_scatter/cuda_swapped_kernel.cuh"

namespace mk::gemm_reduce_scatter::swapped {

const SwappedTable& kernels_fp16() { return kernel_table<__half>(); }

}  // namespace mk::gemm_reduce_scatter::swapped
