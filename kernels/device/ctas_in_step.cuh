// SPDX-License-Identifier: MIT
// Keeps the CTAs that compute in step, so that what the tiles of a wave have in common is read into the L2
// once. Left alone, a CTA that is a part of a tile ahead of the others reads its own copy from HBM, and once
// that is what all of them wait for, nothing brings them together again.
#pragma once

#include <cstdint>

#include "kernels/ptx/memory.cuh"
#include "kernels/ptx/warp.cuh"

namespace mk {

// By the producers of `num_ctas` CTAs, one thread each. At a tile's beginning each waits until all have come
// near theirs: a courtesy on which nothing depends, so it ends by itself.
class CtasInStep {
  static constexpr uint32_t CTA_HAS_LEFT = 1 << 24;  // more than the tiles of all CTAs

 public:
  // `num_near`: tiles that CTAs have come near; 0 between launches. `near_k_steps`: how many before a tile's
  // end a CTA is near the next; 0: each goes its own way. `patience_ns`: for how long the others are waited
  // for.
  __device__ __forceinline__ CtasInStep(uint32_t* num_near, int num_ctas, int near_k_steps,
                                        uint64_t patience_ns = 100000)
      : num_near_(num_near), num_ctas_(num_ctas), near_k_steps_(near_k_steps), patience_ns_(patience_ns) {}

  // The first tile is near.
  __device__ __forceinline__ void begin() const {
    if (near_k_steps_ > 0) ptx::red_relaxed_gpu_add(num_near_, 1);
  }
  // Before the first loads of the CTA's tile `ordinal`.
  __device__ __forceinline__ void await_others(int ordinal) const {
    if (near_k_steps_ == 0) return;
    const auto all = static_cast<uint32_t>((ordinal + 1) * num_ctas_);
    const uint64_t begin = ptx::globaltimer();
    while (ptx::ld_relaxed_gpu(num_near_) < all && ptx::globaltimer() < begin + patience_ns_) {
    }
  }
  // With the loads of each k-step of a tile.
  __device__ __forceinline__ void at_k_step(int k_step, int k_begin, int k_end) const {
    if (near_k_steps_ > 0 && k_step == max(k_end - near_k_steps_, k_begin))
      ptx::red_relaxed_gpu_add(num_near_, 1);
  }
  // This CTA has no more tiles. The others, at their last or last but one, then wait for nobody; the last to
  // leave puts the count back to 0.
  __device__ __forceinline__ void leave() const {
    if (near_k_steps_ == 0) return;
    const uint32_t before = ptx::atom_relaxed_gpu_add(num_near_, CTA_HAS_LEFT);
    if (before / CTA_HAS_LEFT + 1 == static_cast<uint32_t>(num_ctas_)) ptx::st_relaxed_gpu(num_near_, 0);
  }

 private:
  uint32_t* num_near_;
  int num_ctas_;
  int near_k_steps_;
  uint64_t patience_ns_;
};

}  // namespace mk
