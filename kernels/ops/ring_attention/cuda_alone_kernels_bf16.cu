// SPDX-License-Identifier: MIT
#include "kernels/ops/ring_attention/cuda_kernel.cuh"

namespace mk::ring_attention {

const AloneTable& cuda_alone_kernels_bf16() { return cuda_kernel_table<__nv_bfloat16, AloneParams>(); }

}  // namespace mk::ring_attention
