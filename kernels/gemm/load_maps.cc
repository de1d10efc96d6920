// SPDX-License-Identifier: MIT
#include "kernels/gemm/load_maps.h"

#include "kernels/gemm/tensor_map.h"

namespace mk {

bool encode_map_of_a(const GemmPlan& plan, GemmType type, const void* a, int64_t m, int64_t k, int64_t lda,
                     bool transposed, LoadParams* load) {
  const int num_sharing = plan.cluster.n;
  load->a_box =
      BoxRows(num_sharing > 1 ? shared_box_rows(plan.block_m, num_sharing) : stage_box_rows(m, plan.block_m));
  return transposed ? encode_tensor_map(&load->map_a, type, a, k, m, lda, GEMM_BLOCK_K / num_sharing, 64)
                    : encode_tensor_map(&load->map_a, type, a, m, k, lda, load->a_box.num(), GEMM_BLOCK_K);
}

bool encode_map_of_b(const GemmPlan& plan, GemmType type, const void* b, int64_t n, int64_t k, int64_t ldb,
                     bool transposed, int tile_columns, LoadParams* load) {
  const int num_sharing = plan.cluster.m;
  load->n = static_cast<int>(n);
  load->b_box =
      BoxRows(num_sharing > 1 ? shared_box_rows(tile_columns, num_sharing) : stage_box_rows(n, tile_columns));
  return transposed ? encode_tensor_map(&load->map_b, type, b, n, k, ldb, load->b_box.num(), GEMM_BLOCK_K)
                    : encode_tensor_map(&load->map_b, type, b, k, n, ldb, GEMM_BLOCK_K / num_sharing, 64);
}

}  // namespace mk
