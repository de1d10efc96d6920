// SPDX-License-Identifier: MIT
#include "kernels/ops/gemm_reduce_scatter/cuda_tagged_kernel.cuh"

namespace mk::gemm_reduce_scatter::tagged {

const TaggedTable& kernels_fp16() { return kernel_table<__half>(); }

}  // namespace mk::gemm_reduce_scatter::tagged
