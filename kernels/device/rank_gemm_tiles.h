// SPDX-License-Identifier: MIT
#pragma once

#include "kernels/gemm/gemm_plan.h"

namespace mk {

// The tiles that the operators' kernels exist for, in the order of their tables.
constexpr GemmTile RANK_GEMM_TILES[] = {
    {128, 256, false}, {128, 160, true}, {128, 128, true}, {64, 128, false}, {64, 64, false}};
constexpr int NUM_RANK_GEMM_TILES = sizeof(RANK_GEMM_TILES) / sizeof(RANK_GEMM_TILES[0]);
// Inside a node an all-gather has two more. What the other operators exchange of a tile lies in places for one
// of 128 x 256. The last one is for few rows (gather_tiles() in allgather_gemm_plan.cc).
constexpr GemmTile GATHER_TILES[] = {{128, 256, false}, {256, 160, false}, {128, 160, true}, {128, 128, true},
                                     {64, 128, false},  {64, 64, false},   {128, 224, false}};
constexpr int NUM_GATHER_TILES = sizeof(GATHER_TILES) / sizeof(GATHER_TILES[0]);
// Of mode WGRAD, where C is a weight: mostly large.
constexpr GemmTile WGRAD_TILES[] = {{128, 256, false}, {128, 128, true}, {64, 64, false}};
constexpr int NUM_WGRAD_TILES = sizeof(WGRAD_TILES) / sizeof(WGRAD_TILES[0]);
// Of GEMM_SWAPPED_TILES those for some hundred rows inside a node, of mode WGRAD none.
constexpr GemmSwappedTile RANK_SWAPPED_TILES[] = {
    {128, 80, {1, 2}},  {128, 104, {1, 2}}, {128, 128, {1, 2}}, {128, 152, {1, 2}}, {128, 176, {1, 2}},
    {128, 192, {1, 2}}, {128, 216, {1, 2}}, {128, 240, {1, 2}}, {128, 104, {4, 1}}, {128, 136, {4, 1}},
    {128, 160, {4, 1}}, {128, 208, {4, 1}}, {256, 104, {1, 2}}, {256, 152, {1, 2}}, {256, 176, {1, 2}}};
constexpr int NUM_RANK_SWAPPED_TILES = sizeof(RANK_SWAPPED_TILES) / sizeof(RANK_SWAPPED_TILES[0]);

}  // namespace mk
