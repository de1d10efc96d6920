// SPDX-License-Identifier: MIT
// Pushing by the bulk copy engine: a warp has two buffers in shared memory, through which pieces go on their
// way to a peer, one being loaded while the other is stored. Warps of a CTA that computes, or of a CTA that
// does nothing else.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/device/push_signals.cuh"
#include "kernels/device/rank_comm.h"
#include "kernels/ptx/mbarrier.cuh"
#include "kernels/ptx/tma.cuh"
#include "kernels/ptx/warp.cuh"

namespace mk {

constexpr int PUSH_STAGES = 2;
// A piece of a push warp beside a product, and of a warp of a CTA that does nothing else.
constexpr int PUSH_PIECE_BYTES = 4096;
constexpr int PUSH_CTA_PIECE_BYTES = 8192;
// Named barrier of the push warps; those below are the mainloop's (gemm_roles.cuh).
constexpr int PUSH_BARRIER = 6;

template <int NUM_WARPS_, int PIECE_BYTES_>
struct alignas(128) PushStorage {
  static constexpr int NUM_WARPS = NUM_WARPS_;
  static constexpr int PIECE_BYTES = PIECE_BYTES_;
  uint8_t bytes[NUM_WARPS][PUSH_STAGES][PIECE_BYTES];
  uint64_t loaded[NUM_WARPS][PUSH_STAGES];
  uint64_t begun;  // for who waits for it: all warps have asked for their first pieces, or have none
};

// By one thread, before a fence.mbarrier_init and a CTA-wide barrier.
template <class Storage>
__device__ __forceinline__ void push_init(Storage& storage) {
  for (auto& warp : storage.loaded) {
    for (uint64_t& loaded : warp) ptx::mbarrier_init(&loaded, 1);
  }
  ptx::mbarrier_init(&storage.begun, Storage::NUM_WARPS);
}

// A CTA that only pushes: all of its warps, but the last, which signals.
template <int NUM_THREADS>
struct PushCtaStorage {
  static constexpr int NUM_WARPS = NUM_THREADS / 32 - 1;
  PushStorage<NUM_WARPS, PUSH_CTA_PIECE_BYTES> push;
  PushSignals<NUM_WARPS> signals;
};

// By all its threads.
template <int NUM_THREADS>
__device__ __forceinline__ void push_cta_init(PushCtaStorage<NUM_THREADS>& storage) {
  if (threadIdx.x == 0) {
    push_init(storage.push);
    push_signals_init(storage.signals);
    ptx::fence_mbarrier_init_release_cluster();
  }
  __syncthreads();
}

// By all its threads, when every warp has stored all it has loaded: the memory is free for another role's
// barriers and TMA, by thread 0 at once, by the others after the next CTA-wide barrier.
template <int NUM_THREADS>
__device__ __forceinline__ void push_cta_end(PushCtaStorage<NUM_THREADS>& storage) {
  ptx::fence_proxy_async_shared_cta();
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (auto& warp : storage.push.loaded) {
    for (uint64_t& loaded : warp) ptx::mbarrier_inval(&loaded);
  }
  ptx::mbarrier_inval(&storage.push.begun);
}

// By a warp of the same CTA that has nothing to push.
template <class Storage>
__device__ __forceinline__ void push_nothing(Storage& storage) {
  if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(&storage.begun);
}

// A push warp's side of it. All functions are called by the whole warp.
template <class Storage>
class BulkPush {
 public:
  static constexpr int PIECE_BYTES = Storage::PIECE_BYTES;

  __device__ BulkPush(Storage& storage, int warp)
      : buffers_(storage.bytes[warp]), loaded_(storage.loaded[warp]), begun_(storage.begun) {}

  // Moves the pieces that next(&piece) gives until it answers false; each is loaded while the one before is
  // being stored. load(piece, buffer, loaded) asks for it, every lane for its part; store(piece, buffer) asks
  // for its way out. One commit group a piece.
  template <class Piece, class Next, class Load, class Store>
  __device__ __forceinline__ void move(Next&& next, Load&& load, Store&& store) {
    Piece piece;
    bool has_piece = next(&piece);
    if (has_piece) begin_load(piece, stage_, load);
    while (has_piece) {
      Piece following;
      has_piece = next(&following);
      if (has_piece) begin_load(following, stage_ ^ 1, load);
      while (!ptx::mbarrier_try_wait_parity(&loaded_[stage_], phases_ >> stage_ & 1)) {
      }
      phases_ ^= 1u << stage_;
      store(piece, buffers_[stage_]);
      stage_ ^= 1;
      piece = following;
    }
  }

  // Until everything stored but the last NUM_PENDING pieces is where it belongs, and may be signalled by any
  // lane.
  template <int NUM_PENDING>
  __device__ __forceinline__ void complete() {
    ptx::cp_async_bulk_wait_group<NUM_PENDING>();
    __syncwarp();
  }

  // The first piece has been asked for, or there is none.
  __device__ __forceinline__ void tell_begun() {
    if (!has_told_ && threadIdx.x % 32 == 0) ptx::mbarrier_arrive(&begun_);
    has_told_ = true;
  }

 private:
  static_assert(PUSH_STAGES == 2);

  template <class Piece, class Load>
  __device__ __forceinline__ void begin_load(const Piece& piece, int stage, Load&& load) {
    ptx::cp_async_bulk_wait_group_read<0>();  // what was stored from the buffer has been read
    __syncwarp();
    load(piece, buffers_[stage], &loaded_[stage]);
  }

  uint8_t (&buffers_)[PUSH_STAGES][PIECE_BYTES];
  uint64_t (&loaded_)[PUSH_STAGES];
  uint64_t& begun_;
  bool has_told_ = false;
  uint32_t phases_ = 0;
  int stage_ = 0;
};

}  // namespace mk
