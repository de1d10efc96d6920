// SPDX-License-Identifier: MIT
#include "kernels/gemm/gemm_split_kernel.cuh"

namespace mk {

const GemmSwappedClusterKernelTable& gemm_swapped_cluster_kernels_bf16_kn() {
  return gemm_swapped_cluster_kernel_table<__nv_bfloat16, false>();
}

}  // namespace mk
