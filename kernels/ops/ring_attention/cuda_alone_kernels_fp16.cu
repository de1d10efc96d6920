// SPDX-License-Identifier: MIT
#include "kernels/ops/ring_attention/cuda_kernel.cuh"

namespace mk::ring_attention {

const AloneTable& cuda_alone_kernels_fp16() { return cuda_kernel_table<__half, AloneParams>(); }

}  // namespace mk::ring_attention
