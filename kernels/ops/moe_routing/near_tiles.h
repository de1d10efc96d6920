// SPDX-License-Identifier: MIT
// Mixture of experts on GPUs of several nodes: which tiles of a rank's experts have to do with its own node
// alone, all of their rows being of its ranks' tokens. Of some experts a dispatch computes those first, while
// others' rows are on their way, and a combine last, while the sums of others' tokens are on theirs. Host and
// device.
#pragma once

#include "kernels/device/grouped_tiles.h"
#include "kernels/ops/moe_routing/node_tokens.h"
#include "kernels/ops/moe_routing/row_segments.h"

namespace mk::moe {

// Local experts that a CTA has ranges for: of two ranks or more.
constexpr int MAX_NEAR_RANGES = (CUDA_MAX_EXPERTS + 1) / 2;

// The weights of experts whose tiles are walked in two passes are read twice, so they are no more than it takes
// to fill the time: a dispatch's last ones, a combine's first. `num_split`: as many of each rank's.
MK_HOST_DEVICE int first_split(const CudaRouting& routing, int rank, int num_split) {
  const int unsplit = routing.num_experts(rank) - num_split;
  return routing.combines || unsplit < 0 ? 0 : unsplit;
}
MK_HOST_DEVICE bool is_split(const CudaRouting& routing, int rank, int num_split, int local_expert) {
  const int first = first_split(routing, rank, num_split);
  return local_expert >= first && local_expert < first + num_split;
}

// Rows lie in the order of the ranks whose tokens they are; of the runs of rows of the own node's the longest
// counts. In whole blocks, of which flags tell.
MK_HOST_DEVICE TileRange near_tiles(const CudaRouting& routing, const NodeMap& nodes, const Counts& counts,
                                    int expert, int block_m) {
  uint32_t row = 0, run_begin = 0, begin = 0, end = 0;
  for (int source = 0; source < routing.nranks; ++source) {
    const uint32_t rows = counts.expert_rows(source, expert);
    row += rows;
    if (nodes.node[source] != nodes.node[routing.rank] && rows > 0) run_begin = row;
    if (row - run_begin > end - begin) {
      begin = run_begin;
      end = row;
    }
  }
  const uint32_t first_block = (begin + BLOCK_ROWS - 1) / BLOCK_ROWS;
  const uint32_t end_block = end == row ? num_row_blocks(row) : end / BLOCK_ROWS;
  if (first_block >= end_block) return {0, 0};
  const uint32_t tiles_per_block = BLOCK_ROWS / block_m;
  const uint32_t num_tiles = (row + block_m - 1) / block_m;
  const auto tile_of = [&](uint32_t block) {
    // What has no number here is among the others.
    constexpr uint32_t MOST = UINT16_MAX;
    const uint32_t tile = block * tiles_per_block < num_tiles ? block * tiles_per_block : num_tiles;
    return static_cast<uint16_t>(tile < MOST ? tile : MOST);
  };
  return {tile_of(first_block), tile_of(end_block)};
}

}  // namespace mk::moe
