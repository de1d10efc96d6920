// SPDX-License-Identifier: MIT
// Numbers of work items on their way from a CTA's producer to its consumers, through shared memory.
#pragma once

#include <cstdint>

#include "kernels/ptx/mbarrier.cuh"

namespace mk::ring_attention {

__device__ __forceinline__ void wait_barrier(uint64_t* barrier, uint32_t phase) {
  while (!ptx::mbarrier_try_wait_parity(barrier, phase)) {
  }
}

constexpr int NUM_ITEMS_AHEAD = 2;

struct ItemQueue {
  int items[NUM_ITEMS_AHEAD];  // -1 behind the last
  uint64_t full[NUM_ITEMS_AHEAD];
  uint64_t empty[NUM_ITEMS_AHEAD];
};

// By one thread of the CTA; a fence.mbarrier_init and a CTA-wide barrier must follow.
__device__ __forceinline__ void item_queue_init(ItemQueue& queue, int num_consumer_warps) {
  for (int slot = 0; slot < NUM_ITEMS_AHEAD; ++slot) {
    ptx::mbarrier_init(&queue.full[slot], 1);
    ptx::mbarrier_init(&queue.empty[slot], num_consumer_warps);
  }
}

struct ItemCursor {
  int slot = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void advance() {
    if (++slot == NUM_ITEMS_AHEAD) {
      slot = 0;
      phase ^= 1;
    }
  }
};

// By the producer, one thread. describe(): tells consumers what else is theirs to know, once there is room.
template <class Describe>
__device__ __forceinline__ void put_item(ItemQueue& queue, ItemCursor& cursor, int item, Describe&& describe) {
  wait_barrier(&queue.empty[cursor.slot], cursor.phase ^ 1);
  queue.items[cursor.slot] = item;
  describe();
  ptx::mbarrier_arrive(&queue.full[cursor.slot]);
  cursor.advance();
}
__device__ __forceinline__ void put_item(ItemQueue& queue, ItemCursor& cursor, int item) {
  put_item(queue, cursor, item, [] {});
}

// By every consumer warp: waits for the next item, which stays where it is until it is let go.
__device__ __forceinline__ int await_item(ItemQueue& queue, const ItemCursor& cursor) {
  wait_barrier(&queue.full[cursor.slot], cursor.phase);
  return queue.items[cursor.slot];
}
__device__ __forceinline__ void release_item(ItemQueue& queue, ItemCursor& cursor) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(&queue.empty[cursor.slot]);
  cursor.advance();
}

}  // namespace mk::ring_attention
