// SPDX-License-Identifier: MIT
#include "kernels/gemm/load_maps.h"

#include "kernels/gemm/tensor_map.h"

namespace mk {

bool encode_map_of_b(const GemmPlan& plan, GemmType type, const void* b, int64_t n, int64_t k, int64_t ldb,
                     bool transposed, LoadParams* load) {
  const int parts = plan.in_pairs ? 2 : 1;
  load->n = static_cast<int>(n);
  load->b_box_rows = transposed && !plan.in_pairs ? stage_box_rows(n, plan.block_n) : plan.block_n / parts;
  return transposed ? encode_tensor_map(&load->map_b, type, b, n, k, ldb, load->b_box_rows, GEMM_BLOCK_K)
                    : encode_tensor_map(&load->map_b, type, b, k, n, ldb, GEMM_BLOCK_K / parts, 64);
}

}  // namespace mk
