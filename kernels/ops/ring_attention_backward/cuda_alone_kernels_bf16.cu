// SPDX-License-Identifier: MIT
#include "kernels/ops/ring_attention_backward/cuda_kernel.cuh"

namespace mk::ring_attention_backward {

const AloneTable& cuda_alone_kernels_bf16() { return cuda_kernel_table<__nv_bfloat16, AloneParams>(); }
const CircularTable& cuda_circular_kernels_bf16() { return cuda_kernel_table<__nv_bfloat16, CircularParams>(); }

}  // namespace mk::ring_attention_backward
