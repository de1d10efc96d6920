// SPDX-License-Identifier: MIT
#include "kernels/gemm/gemm_swapped_kernel.cuh"

namespace mk {

const GemmSwappedKernelTable& gemm_swapped_kernels_bf16_kn() {
  return gemm_swapped_kernel_table<__nv_bfloat16, false>();
}

}  // namespace mk
