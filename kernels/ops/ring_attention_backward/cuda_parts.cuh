// SPDX-License-Identifier: MIT
// Gradients of ring attention: where the parts of other ranks' keys go that a rank has computed, and how it
// tells of them. Kernels between nodes have other places (cuda_network.cuh).
#pragma once

#include "kernels/device/push_signals.cuh"
#include "kernels/device/rank_launch.cuh"
#include "kernels/ops/ring_attention/cuda_push.cuh"
#include "kernels/ops/ring_attention_backward/cuda_params.h"

namespace mk::ring_attention_backward {

using ring_attention::slot_of;
using ring_attention::source_of;

__device__ __forceinline__ const KeyTiles& key_tiles_of(const CudaParams& params) { return params.key_tiles; }
__device__ __forceinline__ int source_of(const CudaParams& params, int step) {
  return params.key_tiles.source(step);
}
template <class Tiles>
__device__ __forceinline__ const Tiles& key_tiles_of(const AloneParamsOf<Tiles>& params) {
  return params.key_tiles;
}

// Who gets the part of a tile of another rank's keys.
template <class Params>
__device__ __forceinline__ int part_receiver(const Params& params, const KeyTile& tile) {
  return source_of(params, tile.step);
}
// In which slot, of the receiver.
template <class Params>
__device__ __forceinline__ int part_slot(const Params& params, const KeyTile& tile) {
  return params.comm.nranks - tile.step;
}
template <class Params>
__device__ __forceinline__ size_t part_offset(const Params& params, int slot, const KeyTile& tile) {
  return params.panels.part(slot, tile.head, tile.run, tile.index);
}
// Of the panels' parts that are counted: the first. Behind the pushed keys'.
template <class Params>
__device__ __forceinline__ int first_part_count(const Params& params) {
  return params.panels.num_units();
}

// Does rank `other` have a part of a tile of this rank's keys?
template <class Params>
__device__ __forceinline__ bool has_part(const Params& params, int other, const KeyTile& tile) {
  return tile.index < seen_tiles(params.tiles.slices, other, params.comm.rank, tile.run);
}

// Of the tiles of a panel's keys those of which this rank has parts.
template <class Params>
__device__ __forceinline__ int parts_of_panel(const Params& params, const KeyTile& tile, int panel) {
  const int panel_tiles = params.panels.panel_tiles();
  const int seen = key_tiles_of(params).seen_tiles_of(tile.step, tile.run);
  return least(panel_tiles, seen - panel * panel_tiles);
}

// The first warp behind the producer's: tells those who get parts that a panel's have arrived. Notes are
// numbers of tiles, by each of NUM_WARPS warps.
template <int NUM_WARPS, class Params>
__device__ __forceinline__ void signal_parts(const RankLaunch& launch, const Params& params,
                                             PushSignals<NUM_WARPS>& stored) {
  const auto& panels = params.panels;
  send_signals(
      stored,
      [&](uint64_t note, uint32_t* expected) {
        const KeyTile tile = key_tiles_of(params).at(static_cast<int>(note));
        const int panel = tile.index / panels.panel_tiles();
        *expected = parts_of_panel(params, tile, panel) * NUM_WARPS;
        return &params.comm.state->counts[first_part_count(params) +
                                          panels.flag(slot_of(params, tile.step), tile.head, tile.run, panel)];
      },
      [&](uint64_t note) {
        // Parts that were made of what never came are none.
        if (launch.stopped()) return;
        const KeyTile tile = key_tiles_of(params).at(static_cast<int>(note));
        launch.raise_flag_relaxed(part_receiver(params, tile),
                                  panels.part_flag(part_slot(params, tile), tile.head, tile.run, tile.index));
      });
}

}  // namespace mk::ring_attention_backward
