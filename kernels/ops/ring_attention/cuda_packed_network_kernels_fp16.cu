// SPDX-License-Identifier: MIT
#include "kernels/ops/ring_attention/cuda_packed_network_kernel.cuh"

namespace mk::ring_attention {

const PackedNetworkTable& cuda_packed_network_kernels_fp16() {
  return cuda_packed_network_kernel_table<__half>();
}

}  // namespace mk::ring_attention
