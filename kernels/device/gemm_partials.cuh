// SPDX-License-Identifier: MIT
// Partial sums of tiles whose inner dimension is cut among workers: written and read register by register, summed
// in the order of k, so that the bits do not depend on timing.
#pragma once

#include <cstdint>

#include "kernels/device/gemm_partials_layout.h"
#include "kernels/ptx/memory.cuh"
#include "kernels/ptx/warp.cuh"

namespace mk {

// Barrier 0 is the CTA's; each consumer warpgroup has one of its own.
__device__ __forceinline__ void warpgroup_sync(int warpgroup) { ptx::barrier_sync(1 + warpgroup, 128); }

// Register quadruple i of thread t lies at i * 128 + t: coalesced, and read back by the same thread index.
// Warps without a valid row (`has_rows` false) move nothing.
template <int NUM_ACCUMULATORS>
__device__ __forceinline__ void partials_store(const float (&accumulators)[NUM_ACCUMULATORS],
                                               const PartialsLayout& layout, void* workspace, int cta,
                                               int warpgroup, bool has_rows) {
  const int thread = threadIdx.x % 128;
  if (has_rows) {
    float4* destination =
        reinterpret_cast<float4*>(layout.tile(workspace, cta) + warpgroup * NUM_ACCUMULATORS * 128) + thread;
#pragma unroll
    for (int i = 0; i < NUM_ACCUMULATORS / 4; ++i) {
      ptx::st_global_cg_v4(destination + i * 128,
                           make_float4(accumulators[4 * i], accumulators[4 * i + 1], accumulators[4 * i + 2],
                                       accumulators[4 * i + 3]));
    }
  }
  // The barrier orders the other threads' stores before thread 0's release, which is cumulative.
  warpgroup_sync(warpgroup);
  if (thread == 0) ptx::st_release_gpu(layout.flag(workspace, cta, warpgroup), 1);
}

template <int NUM_ACCUMULATORS>
__device__ __forceinline__ void partials_add(float (&accumulators)[NUM_ACCUMULATORS],
                                             const PartialsLayout& layout, void* workspace, int cta,
                                             int warpgroup, bool has_rows) {
  const int thread = threadIdx.x % 128;
  if (thread == 0) {
    uint32_t* flag = layout.flag(workspace, cta, warpgroup);
    while (ptx::ld_acquire_gpu(flag) == 0) {
    }
    ptx::st_relaxed_gpu(flag, 0);
  }
  warpgroup_sync(warpgroup);
  if (!has_rows) return;
  const float4* source =
      reinterpret_cast<const float4*>(layout.tile(workspace, cta) + warpgroup * NUM_ACCUMULATORS * 128) + thread;
#pragma unroll
  for (int i = 0; i < NUM_ACCUMULATORS / 4; ++i) {
    const float4 partial = ptx::ld_global_cg_v4(source + i * 128);
    accumulators[4 * i] += partial.x;
    accumulators[4 * i + 1] += partial.y;
    accumulators[4 * i + 2] += partial.z;
    accumulators[4 * i + 3] += partial.w;
  }
}

}  // namespace mk
