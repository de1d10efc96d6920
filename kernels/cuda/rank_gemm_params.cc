// SPDX-License-Identifier: MIT
#include "kernels/cuda/rank_gemm_params.h"

#include <algorithm>

#include "kernels/cuda/gemm_type.h"
#include "kernels/gemm/load_maps.h"
#include "kernels/gemm/tensor_map.h"

namespace mk {
namespace {

bool has_a(const GemmCall& call, int64_t a_rows) { return a_rows > 0 && call.k > 0; }
bool has_b(const GemmCall& call) { return call.n > 0 && call.k > 0; }

// Elements from one row to the next, as maps want them.
int64_t map_pitch(int64_t ld, int64_t columns) {
  return std::max<int64_t>(round_up(std::max(ld, columns), 8), 8);
}
int64_t pitch_of_a(const GemmCall& call) { return map_pitch(call.lda, call.k); }
int64_t pitch_of_b(const GemmCall& call) {
  return map_pitch(call.ldb, call.b_layout == MK_LAYOUT_NK ? call.k : call.n);
}

}  // namespace

bool fill_load(const GemmCall& call, const GemmPlan& plan, int64_t a_rows, int64_t max_rows, const void* any,
               LoadParams* load) {
  const GemmType type = gemm_type(call.dtype);
  load->a_box = BoxRows(stage_box_rows(max_rows, plan.block_m));
  return encode_tensor_map(&load->map_a, type, has_a(call, a_rows) ? call.a : any, a_rows, call.k,
                           pitch_of_a(call), load->a_box.num(), GEMM_BLOCK_K) &&
         encode_map_of_b(plan, type, has_b(call) ? call.b : any, call.n, call.k, pitch_of_b(call),
                         call.b_layout == MK_LAYOUT_NK, plan.block_n, load);
}

bool fill_swapped_load(const GemmCall& call, const GemmPlan& plan, const void* a, const void* any,
                       LoadParams* load) {
  const GemmType type = gemm_type(call.dtype);
  GemmShape shape;
  shape.m = call.m;
  shape.n = call.n;
  shape.k = call.k;
  return encode_map_of_a(plan, type, has_b(call) ? call.b : any, call.n, call.k, pitch_of_b(call),
                         call.b_layout != MK_LAYOUT_NK, load) &&
         encode_map_of_b(plan, type, has_a(call, call.m) ? a : any, call.m, call.k, pitch_of_a(call), true,
                         gemm_plan_tile_columns(shape, plan), load);
}

bool move_load(const GemmCall& call, int64_t a_rows, bool is_swapped, LoadParams* load) {
  return (!has_a(call, a_rows) || move_tensor_map(is_swapped ? &load->map_b : &load->map_a, call.a)) &&
         (!has_b(call) || move_tensor_map(is_swapped ? &load->map_a : &load->map_b, call.b));
}

EpilogueParams epilogue_of(const GemmCall& call) {
  EpilogueParams epilogue{};
  epilogue.ldc = std::max(call.ldc, call.n);
  epilogue.n = static_cast<int>(call.n);
  epilogue.out_type = gemm_type(call.out_dtype);
  epilogue.bias_type = gemm_type(call.bias_dtype);
  epilogue.accumulate = call.accumulate;
  move_epilogue(call, &epilogue);
  return epilogue;
}

void move_epilogue(const GemmCall& call, EpilogueParams* epilogue) {
  epilogue->c = call.c;
  epilogue->bias = call.bias;
  epilogue->rows_aligned =
      reinterpret_cast<uintptr_t>(call.c) % 16 == 0 && epilogue->ldc * element_bytes(call.out_dtype) % 16 == 0;
}

TileSchedule tiles_of(const GemmCall& call, const RankGemmPlan& plan) {
  const bool is_swapped = plan.gemm.is_swapped;
  const int64_t columns =
      is_swapped ? ceil_div(call.m, plan.gemm.cluster_columns()) : ceil_div(call.n, plan.gemm.block_n);
  TileSchedule tiles = {is_swapped ? static_cast<int>(ceil_div(call.n, plan.gemm.cluster_rows()))
                                   : plan.num_owners * plan.tile_rows,
                        static_cast<int>(columns),
                        static_cast<int>(ceil_div(call.k, GEMM_BLOCK_K)),
                        plan.plan.compute_ctas,
                        plan.gemm.num_streamk_tiles,
                        plan.gemm.group_m,
                        true};
  tiles.keep_in_step_from(plan.out_of_step_k_steps);
  return tiles;
}

}  // namespace mk
