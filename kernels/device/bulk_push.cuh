// SPDX-License-Identifier: MIT
// Pushing by the bulk copy engine: a warp has a buffer in shared memory that a piece goes through on its way to
// a peer. Two warps of a CTA that computes, so that the SM's load and store units are left to the product; or
// all warps of a CTA that does nothing else.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/ptx/mbarrier.cuh"
#include "kernels/ptx/tma.cuh"
#include "kernels/ptx/warp.cuh"

namespace mk {

constexpr int NUM_PUSH_WARPS = 2;
constexpr int PUSH_BUFFER_BYTES = 8192;
// Named barrier of the push warps; those below are the mainloop's (gemm_roles.cuh).
constexpr int PUSH_BARRIER = 6;

struct alignas(128) PushStorage {
  uint8_t bytes[NUM_PUSH_WARPS][PUSH_BUFFER_BYTES];
  uint64_t loaded[NUM_PUSH_WARPS];
};

// By one thread, before a fence.mbarrier_init and a CTA-wide barrier.
__device__ __forceinline__ void push_init(PushStorage& storage) {
  for (uint64_t& loaded : storage.loaded) ptx::mbarrier_init(&loaded, 1);
}

// The shared memory of a CTA that only pushes.
template <int NUM_WARPS>
struct alignas(128) PushCtaStorage {
  static constexpr int BUFFERS = 2;  // of PUSH_BUFFER_BYTES, one after another
  uint8_t bytes[NUM_WARPS][BUFFERS * PUSH_BUFFER_BYTES];
  uint64_t loaded[NUM_WARPS];
};

// A push warp's side of it. All functions are called by the whole warp.
class BulkPush {
 public:
  template <class Storage>
  __device__ BulkPush(Storage& storage, int warp)
      : buffer_(storage.bytes[warp]), loaded_(&storage.loaded[warp]) {}

  __device__ uint8_t* buffer() const { return buffer_; }
  __device__ uint64_t* loaded() const { return loaded_; }

  // Brings `num_bytes` into the buffer: issue() asks for them, every lane for its part.
  template <class Issue>
  __device__ __forceinline__ void load(uint32_t num_bytes, Issue&& issue) {
    ptx::cp_async_bulk_wait_group_read<0>();  // what was stored from the buffer has been read
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive_expect_tx(loaded_, num_bytes);
    __syncwarp();
    issue();
    while (!ptx::mbarrier_try_wait_parity(loaded_, phase_)) {
    }
    phase_ ^= 1;
  }

  // Until everything stored is where it belongs, and may be signalled by any lane.
  __device__ __forceinline__ void complete() {
    ptx::cp_async_bulk_wait_group<0>();
    __syncwarp();
  }

 private:
  uint8_t* const buffer_;
  uint64_t* const loaded_;
  uint32_t phase_ = 0;
};

}  // namespace mk
