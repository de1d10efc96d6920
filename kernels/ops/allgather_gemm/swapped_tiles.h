// SPDX-License-Identifier: MIT
#pragma once

#include "kernels/gemm/gemm_plan.h"

namespace mk::allgather_gemm {

// Of GEMM_SWAPPED_CLUSTER_TILES those that an all-gather of some hundred rows has kernels for.
constexpr GemmSwappedTile SWAPPED_TILES[] = {{128, 80, {1, 2}},  {128, 104, {1, 2}}, {128, 128, {1, 2}},
                                             {128, 152, {1, 2}}, {128, 176, {1, 2}}, {128, 216, {1, 2}},
                                             {128, 136, {4, 1}}, {128, 160, {4, 1}}};
constexpr int NUM_SWAPPED_TILES = sizeof(SWAPPED_TILES) / sizeof(SWAPPED_TILES[0]);

}  // namespace mk::allgather_gemm
