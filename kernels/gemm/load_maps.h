// SPDX-License-Identifier: MIT
// The maps by which products load their operands.
#pragma once

#include <cstdint>

#include "kernels/device/load_params.h"
#include "kernels/gemm/gemm_plan.h"

namespace mk {

// The map of a product's A, [m, k] or transposed, and what `load` says of it; false: no such map can be made.
bool encode_map_of_a(const GemmPlan& plan, GemmType type, const void* a, int64_t m, int64_t k, int64_t lda,
                     bool transposed, LoadParams* load);

// The same of B, where a tile has so many of its columns.
bool encode_map_of_b(const GemmPlan& plan, GemmType type, const void* b, int64_t n, int64_t k, int64_t ldb,
                     bool transposed, int tile_columns, LoadParams* load);

}  // namespace mk
