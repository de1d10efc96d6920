// SPDX-License-Identifier: MIT
#include "kernels/ops/ring_attention/cuda_kernel.cuh"

namespace mk::ring_attention {

const CudaTable& cuda_kernels_bf16() { return cuda_kernel_table<__nv_bfloat16, CudaParams>(); }

}  // namespace mk::ring_attention
