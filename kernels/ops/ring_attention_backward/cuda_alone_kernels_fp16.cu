// SPDX-License-Identifier: MIT
#include "kernels/ops/ring_attention_backward/cuda_kernel.cuh"

namespace mk::ring_attention_backward {

const AloneTable& cuda_alone_kernels_fp16() { return cuda_kernel_table<__half, AloneParams>(); }
const CircularTable& cuda_circular_kernels_fp16() { return cuda_kernel_table<__half, CircularParams>(); }

}  // namespace mk::ring_attention_backward
