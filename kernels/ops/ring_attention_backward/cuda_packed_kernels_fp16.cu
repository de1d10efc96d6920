// SPDX-License-Identifier: MIT
#include "kernels/ops/ring_attention_backward/cuda_packed_kernel.cuh"

namespace mk::ring_attention_backward {

const PackedTable& cuda_packed_kernels_fp16() { return cuda_packed_kernel_table<__half>(); }

}  // namespace mk::ring_attention_backward
