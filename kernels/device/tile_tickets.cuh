// SPDX-License-Identifier: MIT
// Tiles that are handed out while a launch runs: a CTA that comes late, or is slow, takes fewer. Which CTA
// computes a tile changes none of its bits. For tiles that have nothing in common: those that share what they
// read are better off with neighbours that stay the same (docs/decisions/011-ctas-in-step.md).
#pragma once

#include <climits>
#include <cstdint>

#include "kernels/ptx/memory.cuh"

namespace mk {

constexpr int NO_TILE = INT_MAX;

// A CTA's tiles, in shared memory: from the warp that takes them to its producer and consumers.
struct TileFeed {
  // More than the tiles by which one of them can be behind another: these have a ring of stages between them.
  static constexpr uint32_t DEPTH = 16;
  uint64_t tiles[DEPTH];  // with the ordinal, from 1 on, above
  uint32_t num_near;      // tiles to whose end the producer has come near
};

// By one thread, before a CTA-wide barrier.
__device__ __forceinline__ void feed_init(TileFeed& feed) {
  for (uint64_t& tile : feed.tiles) tile = 0;
  feed.num_near = 0;
}

// The taker, one thread. The CTA's `ordinal`-th tile is `tile`.
__device__ __forceinline__ void feed_tile(TileFeed& feed, uint32_t ordinal, int tile) {
  *static_cast<volatile uint64_t*>(&feed.tiles[ordinal % TileFeed::DEPTH]) =
      uint64_t{ordinal + 1} << 32 | static_cast<uint32_t>(tile);
}
// Until the tile before is near its end: who takes earlier may be the last to compute.
__device__ __forceinline__ void await_near(const TileFeed& feed, uint32_t ordinal) {
  while (*static_cast<const volatile uint32_t*>(&feed.num_near) < ordinal) __nanosleep(20);
}

// The producer and the consumers.
__device__ __forceinline__ int next_tile(const TileFeed& feed, uint32_t ordinal) {
  const uint64_t* word = &feed.tiles[ordinal % TileFeed::DEPTH];
  uint64_t seen = ptx::ld_volatile(word);
  while (seen >> 32 != ordinal + 1) seen = ptx::ld_volatile(word);
  return static_cast<int>(seen & UINT32_MAX);
}
// The producer, near the end of its `ordinal`-th tile.
__device__ __forceinline__ void near_end(TileFeed& feed, uint32_t ordinal) {
  *static_cast<volatile uint32_t*>(&feed.num_near) = ordinal + 1;
}

}  // namespace mk
