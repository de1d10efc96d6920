// SPDX-License-Identifier: MIT
// Ring attention on GPUs: what a rank's CTAs take, one piece of work after the other. Pure, host and device.
//
// Tiles of queries are long: a tile on an SM takes as long as a small product on all of them. So the last ones
// are handed out with the longest first, and where whole tiles would leave SMs idle at the end, the last are
// cut along their keys into parts. A part's outputs wait in the staging memory until all parts of the tile are
// there, and are then joined in the order of the parts: the same bits whoever came first.
#pragma once

#include "kernels/ops/ring_attention/cuda_blocks.h"

namespace mk::ring_attention {

// A tile, or part `part` of `num_parts` of it.
struct QueryItem {
  int tile;  // number in the order of QueryTiles
  int part;
  int num_parts;
  int slot;  // of all parts of this launch; -1: a whole tile
  int cut;   // number of the tile among those that are cut; 0: a whole tile
};

constexpr int MOST_PARTS = 16;

// Consecutive tiles of as many parts, up to where the next stretch begins.
struct ItemStretch {
  int tile;
  int item;
  int slot;  // of its first part, if there are several
  int cut;
  int num_parts;
};

constexpr int MOST_STRETCHES = 24;

// The pieces of work that so many tiles make.
struct QueryItems {
  int num_items;
  int num_cuts;
  int num_stretches;
  ItemStretch stretches[MOST_STRETCHES];  // the first begins with tile 0

  MK_HOST_DEVICE QueryItem at(int item) const {
    int at = 0;
    while (at + 1 < num_stretches && item >= stretches[at + 1].item) ++at;
    const ItemStretch& stretch = stretches[at];
    const int within = item - stretch.item;
    if (stretch.num_parts == 1) return {stretch.tile + within, 0, 1, -1, 0};
    const int tile = within / stretch.num_parts;
    return {stretch.tile + tile, within - tile * stretch.num_parts, stretch.num_parts, stretch.slot + within,
            stretch.cut + tile};
  }
  // The first part of a tile that is cut.
  MK_HOST_DEVICE QueryItem first_part(int cut) const {
    int at = num_stretches - 1;
    while (cut < stretches[at].cut || stretches[at].num_parts == 1) --at;
    return this->at(stretches[at].item + (cut - stretches[at].cut) * stretches[at].num_parts);
  }
};

// Whole tiles.
MK_HOST_DEVICE QueryItems whole_items(int num_tiles) {
  QueryItems items{};
  items.num_items = num_tiles;
  items.num_stretches = 1;
  items.stretches[0] = {0, 0, 0, 0, 1};
  return items;
}

// Of a tile's blocks, where part `part` begins; none is empty where there are as many blocks as parts.
MK_HOST_DEVICE constexpr int part_begin(int num_blocks, int part, int num_parts) {
  return num_blocks * part / num_parts;
}

// Where parts' outputs wait: rows of fp32, not yet divided by the sums of weights; then for each row what its
// weights are relative to, and their sum.
struct PartPlaces {
  int block_m;
  int head_dim;

  MK_HOST_DEVICE int outputs_bytes() const { return block_m * head_dim * 4; }
  MK_HOST_DEVICE int part_bytes() const { return outputs_bytes() + block_m * 8; }
  MK_HOST_DEVICE size_t outputs(int slot, int row) const {
    return static_cast<size_t>(slot) * part_bytes() + static_cast<size_t>(row) * head_dim * 4;
  }
  MK_HOST_DEVICE size_t weights(int slot, int row) const {
    return static_cast<size_t>(slot) * part_bytes() + outputs_bytes() + row * 8;
  }
};

}  // namespace mk::ring_attention
