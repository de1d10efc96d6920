// SPDX-License-Identifier: MIT
// Telling peers that what was pushed has arrived. The fence that this takes waits for whatever the warp has
// still on its way, 10 us where links are busy; so push warps only note what is complete, and a warp that
// pushes nothing counts and signals for all of them, with two fences for as many notes as there are.
#pragma once

#include <cstdint>

#include "kernels/ptx/memory.cuh"

namespace mk {

// In shared memory, zero at the start.
template <int NUM_PUSH_WARPS_>
struct PushSignals {
  static constexpr int NUM_PUSH_WARPS = NUM_PUSH_WARPS_;
  static_assert(NUM_PUSH_WARPS <= 32);
  static constexpr int DEPTH = 4;
  uint64_t notes[NUM_PUSH_WARPS][DEPTH];
  uint32_t num_noted[NUM_PUSH_WARPS];
  uint32_t num_taken[NUM_PUSH_WARPS];
  uint32_t has_ended[NUM_PUSH_WARPS];
};

// By one thread, before a CTA-wide barrier.
template <class Signals>
__device__ __forceinline__ void push_signals_init(Signals& signals) {
  for (int warp = 0; warp < Signals::NUM_PUSH_WARPS; ++warp) {
    signals.num_noted[warp] = signals.num_taken[warp] = signals.has_ended[warp] = 0;
  }
}

// A push warp's side of it, called by the whole warp.
template <class Signals>
class PushNotes {
 public:
  __device__ PushNotes(Signals& signals, int warp) : signals_(signals), warp_(warp) {}

  // What the warp has seen complete.
  __device__ __forceinline__ void add(uint64_t note) {
    if (threadIdx.x % 32 == 0) {
      volatile uint32_t* taken = &signals_.num_taken[warp_];
      while (num_noted_ - *taken == Signals::DEPTH) __nanosleep(20);
      __threadfence_block();
      signals_.notes[warp_][num_noted_ % Signals::DEPTH] = note;
      __threadfence_block();
      *static_cast<volatile uint32_t*>(&signals_.num_noted[warp_]) = num_noted_ + 1;
    }
    ++num_noted_;
    __syncwarp();
  }
  __device__ __forceinline__ void end() {
    __threadfence_block();
    if (threadIdx.x % 32 == 0) *static_cast<volatile uint32_t*>(&signals_.has_ended[warp_]) = 1;
    __syncwarp();
  }

 private:
  Signals& signals_;
  const int warp_;
  uint32_t num_noted_ = 0;
};

// The signalling warp, until all push warps have ended. count_of(note, &expected) is where a note is counted;
// the last of those expected puts the count back to 0 and makes signal(note), whose stores may be relaxed. Both
// are called by single lanes.
template <class Signals, class CountOf, class Signal>
__device__ __forceinline__ void send_signals(Signals& signals, CountOf&& count_of, Signal&& signal) {
  const int warp = threadIdx.x % 32;
  bool is_open = warp < Signals::NUM_PUSH_WARPS;
  uint32_t num_taken = 0;
  while (__any_sync(~0u, is_open)) {
    bool has_note = false;
    if (is_open) {
      const bool has_ended = *static_cast<volatile uint32_t*>(&signals.has_ended[warp]) != 0;
      __threadfence_block();
      has_note = *static_cast<volatile uint32_t*>(&signals.num_noted[warp]) != num_taken;
      is_open = has_note || !has_ended;
    }
    if (!__any_sync(~0u, has_note)) {
      __nanosleep(20);
      continue;
    }
    uint64_t note = 0;
    bool is_last = false;
    if (has_note) {
      __threadfence_block();
      note = *static_cast<volatile uint64_t*>(&signals.notes[warp][num_taken % Signals::DEPTH]);
    }
    ptx::fence_acq_rel_sys();
    if (has_note) {
      // Behind the fence, since it gives the note's place away.
      *static_cast<volatile uint32_t*>(&signals.num_taken[warp]) = ++num_taken;
      uint32_t expected = 0;
      uint32_t* count = count_of(note, &expected);
      is_last = atomicAdd(count, 1u) + 1 == expected;
      if (is_last) ptx::st_relaxed_gpu(count, 0);
    }
    if (!__any_sync(~0u, is_last)) continue;
    ptx::fence_acq_rel_sys();
    if (is_last) signal(note);
  }
}

}  // namespace mk
