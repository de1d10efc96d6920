// SPDX-License-Identifier: MIT
// Partial sums of tiles that are cut, of emulated consumer warps: each has its rows, and a flag, to itself, and
// sums are whole numbers modulo 2^16 as its products are (emulated_product.h).
#pragma once

#include <cmath>
#include <cstring>

#include "kernels/device/gemm_partials_layout.h"
#include "kernels/ptx/memory.cuh"

namespace mk {

template <int NUM_ACCUMULATORS>
float* emulated_partials(const PartialsLayout& layout, void* workspace, int cta) {
  return layout.block(workspace, cta, 0) + threadIdx.x * NUM_ACCUMULATORS;
}

template <int NUM_ACCUMULATORS>
void partials_store(const float (&accumulators)[NUM_ACCUMULATORS], const PartialsLayout& layout,
                    void* workspace, int cta, int /*block*/, bool /*has_rows*/) {
  std::memcpy(emulated_partials<NUM_ACCUMULATORS>(layout, workspace, cta), accumulators, sizeof accumulators);
  __syncwarp();
  if (threadIdx.x % 32 == 0)
    ptx::st_release_gpu(layout.flag(workspace, cta, static_cast<int>(threadIdx.x / 32)), 1);
}

template <int NUM_ACCUMULATORS, class PeerAt>
void partials_add(float (&accumulators)[NUM_ACCUMULATORS], const PartialsLayout& layout, void* workspace,
                  PeerAt&& peer_at, int num_peers, int /*block*/, bool /*has_rows*/) {
  for (int peer = 0; peer < num_peers; ++peer) {
    uint32_t* const flag = layout.flag(workspace, peer_at(peer), static_cast<int>(threadIdx.x / 32));
    while (ptx::ld_acquire_gpu(flag) == 0) emulation::pause();
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::st_relaxed_gpu(flag, 0);
    const float* const partial = emulated_partials<NUM_ACCUMULATORS>(layout, workspace, peer_at(peer));
    for (int i = 0; i < NUM_ACCUMULATORS; ++i)
      accumulators[i] = std::fmod(accumulators[i] + partial[i], 65536.0f);
  }
}

}  // namespace mk
