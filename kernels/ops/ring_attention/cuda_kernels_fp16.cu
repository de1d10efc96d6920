// SPDX-License-Identifier: MIT
#include "kernels/ops/ring_attention/cuda_kernel.cuh"

namespace mk::ring_attention {

const CudaTable& cuda_kernels_fp16() { return cuda_kernel_table<__half, CudaParams>(); }

}  // namespace mk::ring_attention
