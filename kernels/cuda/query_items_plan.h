// SPDX-License-Identifier: MIT
// In which order ring attention's tiles of queries are handed out, and which are cut along their keys. Pure
// host code. Why: docs/decisions/014-cut-attention-tiles.md.
#pragma once

#include <cstdint>

#include "kernels/ops/ring_attention/cuda_query_items.h"

namespace mk::ring_attention {

// What a tile of queries takes on its SM, in us of an H200 under load (docs/experiments/attention.md).
inline double tile_us(const CudaTile& tile, double blocks, bool has_masks) {
  if (tile.head_dim == 128) return 3.3 + 1.40 * blocks;
  return tile.block_m == 128 ? 2.0 + 1.19 * blocks : (has_masks ? 5.1 : 2.6) + 1.44 * blocks;
}
// From the last part of a tile to its outputs.
constexpr double JOIN_US = 9.0;

// Blocks that a tile has whose last query sees all positions before `end`, all of them from the first.
int blocks_before(const CudaSlices& slices, int64_t end, int block_n);

struct QueryItemsShape {
  CudaTile tile;
  int num_ctas;
  // CTAs of these that come so much later, as long as they push.
  int num_late_ctas;
  double late_us;
  double keys_us;         // until all ranks' keys are there
  int64_t staging_bytes;  // for parts
  int most_cuts;          // tiles that there are counters for
};

// How many of the last key heads to hand out together, whose tiles see more or less.
int choose_joint_heads(const QueryItemsShape& shape, const QueryTiles& tiles);
// How long CTAs take that take one item after the other, by a simulation; with tiles that are cut joined.
double items_us(const QueryItemsShape& shape, const QueryTiles& tiles, const QueryItems& items);
// Sets how many heads of `tiles` are handed out together. Simulates a few ways: too long for every call.
QueryItems plan_query_items(const QueryItemsShape& shape, QueryTiles* tiles);

}  // namespace mk::ring_attention
