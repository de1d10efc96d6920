// SPDX-License-Identifier: MIT
// Partial sums of tiles whose inner dimension is cut among workers: written and read register by register,
// summed in the order of k, so that the bits do not depend on timing.
#pragma once

#include <cstdint>

#include "kernels/device/gemm_partials_layout.h"
#include "kernels/ptx/memory.cuh"
#include "kernels/ptx/warp.cuh"

namespace mk {

// Barrier 0 is the CTA's; each warpgroup has one of its own.
__device__ __forceinline__ void warpgroup_sync() { ptx::barrier_sync(1 + threadIdx.x / 128, 128); }

// Register quadruple i of thread t lies at i * 128 + t: coalesced, and read back by the same thread index.
// Warps without a valid row (`has_rows` false) move nothing. `layout`: a PartialsLayout or SharedPartials.
template <int NUM_ACCUMULATORS, class Layout>
__device__ __forceinline__ void partials_store(const float (&accumulators)[NUM_ACCUMULATORS],
                                               const Layout& layout, void* workspace, int cta, int block,
                                               bool has_rows) {
  const int thread = threadIdx.x % 128;
  if (has_rows) {
    float4* destination = reinterpret_cast<float4*>(layout.block(workspace, cta, block)) + thread;
#pragma unroll
    for (int i = 0; i < NUM_ACCUMULATORS / 4; ++i) {
      ptx::st_global_cg_v4(destination + i * 128,
                           make_float4(accumulators[4 * i], accumulators[4 * i + 1], accumulators[4 * i + 2],
                                       accumulators[4 * i + 3]));
    }
  }
  // The barrier orders the other threads' stores before thread 0's release, which is cumulative.
  warpgroup_sync();
  if (thread == 0) ptx::st_release_gpu(layout.flag(workspace, cta, block), 1);
}

// Adds the partial tiles of `num_peers` CTAs, peer_at(0) and so on, in that order. All flags are polled at once
// and several partials are read at a time: one round trip to L2 each (about 1 us) was most of the cost of
// cutting small products.
template <int NUM_ACCUMULATORS, class Layout, class PeerAt>
__device__ __forceinline__ void partials_add(float (&accumulators)[NUM_ACCUMULATORS], const Layout& layout,
                                             void* workspace, PeerAt&& peer_at, int num_peers, int block,
                                             bool has_rows) {
  const int thread = threadIdx.x % 128;
  // By votes: see store_tile_rows().
  for (int first = 0; first < num_peers; first += 128) {
    const int peer = first + thread;
    const bool has_peer = peer < num_peers;
    uint32_t* flag = layout.flag(workspace, peer_at(has_peer ? peer : 0), block);
    while (!__all_sync(~0u, !has_peer || ptx::ld_acquire_gpu(flag) != 0)) {
    }
    if (has_peer) ptx::st_relaxed_gpu(flag, 0);
  }
  warpgroup_sync();
  if (!__any_sync(~0u, has_rows)) return;
  // As many as there are registers to receive them.
  constexpr int GROUP = NUM_ACCUMULATORS <= 64 ? 4 : 1;
  for (int group = 0; __any_sync(~0u, group < num_peers); group += GROUP) {
    const float4* source[GROUP];
#pragma unroll
    for (int p = 0; p < GROUP; ++p) {
      const int cta = peer_at(group + p < num_peers ? group + p : 0);
      source[p] = reinterpret_cast<const float4*>(layout.block(workspace, cta, block)) + thread;
    }
#pragma unroll
    for (int i = 0; i < NUM_ACCUMULATORS / 4; ++i) {
      float4 partial[GROUP];
#pragma unroll
      for (int p = 0; p < GROUP; ++p) {
        partial[p] = make_float4(0, 0, 0, 0);
        if (group + p < num_peers) partial[p] = ptx::ld_global_cg_v4(source[p] + i * 128);
      }
#pragma unroll
      for (int p = 0; p < GROUP; ++p) {
        accumulators[4 * i] += partial[p].x;
        accumulators[4 * i + 1] += partial[p].y;
        accumulators[4 * i + 2] += partial[p].z;
        accumulators[4 * i + 3] += partial[p].w;
      }
    }
  }
}

}  // namespace mk
