// SPDX-License-Identifier: MIT
// What a product takes by a plan: a model, fitted to one H200. For gemm_plan.cc alone.
#pragma once

#include <cstdint>

#include "kernels/gemm/gemm_plan.h"

namespace mk {

inline int64_t ceil_divide(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Of few rows, in one wave.
constexpr int FEW_ROWS = 512;
constexpr int FEW_ROWS_OF_WHOLE_TILES = 128;  // power limits no clock: up to FEW_ROWS, where tiles are smaller
// With more rows, products are not bound by the weights.
constexpr int FEW_ROWS_OF_CUT_TILES = 256;
// Up to as many a row of tiles of 64 rows is enough.
constexpr int FEW_ROWS_OF_SWAPPED = 64;
// With more rows yet, no plan was measured against the others.
constexpr int SOME_ROWS_OF_CUT_TILES = 1024;
constexpr int64_t MIN_SPLIT_STEPS = 4;  // of a CTA that shares a tile

// Whether all tiles are whole and run at once.
bool is_one_wave(const GemmShape& shape, const GemmPlan& plan);

// Tiles of the same columns of B that are cut are not at the same k at the same time, and each reads its own.
double bytes_read_by_cut_tiles(const GemmShape& shape, const GemmPlan& plan);

// Of these, what the L2 has no longer. CTAs share out the steps of the cut tiles evenly: the next tile of the
// same columns is so many steps behind, or ahead, and meanwhile all CTAs load.
double missed_part_of_cut_tiles(const GemmShape& shape, const GemmPlan& plan);

// A product, of which so many bytes more are read than of its operands and C.
double predict_us(const GemmShape& shape, const GemmPlan& plan, double more_bytes);

// A product of few rows in several waves of whole tiles.
double predict_waves_of_few_rows_us(const GemmShape& shape, const GemmPlan& plan);

// A product of a tile a CTA or a cluster, with few rows or in pairs.
double predict_one_wave_us(const GemmShape& shape, const GemmPlan& plan);

// A product of fewer tiles than workers, each of which is cut in as many pieces: tiles of the same columns are
// at the same k at the same time, as whole ones are. Of a transposed A also one in a wave of whole tiles of 64
// rows.
double predict_evenly_cut_us(const GemmShape& shape, const GemmPlan& plan);

// Of an A that is not transposed one in a wave of whole tiles of 64 rows: as if they were cut in one piece
// each, without what cut ones cost at first.
double predict_low_wave_us(const GemmShape& shape, const GemmPlan& plan);

}  // namespace mk
