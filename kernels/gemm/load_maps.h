// SPDX-License-Identifier: MIT
// The maps by which products load their operands.
#pragma once

#include <cstdint>

#include "kernels/device/load_params.h"
#include "kernels/gemm/gemm_plan.h"

namespace mk {

// The map of a product's A, [m, k] or transposed, and how many rows its boxes have where it is not.
bool encode_map_of_a(const GemmPlan& plan, GemmType type, const void* a, int64_t m, int64_t k, int64_t lda,
                     bool transposed, CUtensorMap* map, int* box_rows);

// The map of a product's B and what `load` says of it, where a tile has so many of its columns; false: no such
// map can be made.
bool encode_map_of_b(const GemmPlan& plan, GemmType type, const void* b, int64_t n, int64_t k, int64_t ldb,
                     bool transposed, int tile_columns, LoadParams* load);

}  // namespace mk
