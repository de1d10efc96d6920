// SPDX-License-Identifier: MIT
// What the kernels of the GEMM operators have in common: a product's roles, and beside them, in the producer's
// warpgroup, three warps that move data.
#pragma once

#include <utility>

#include "kernels/device/bulk_push.cuh"
#include "kernels/device/gemm_epilogue.cuh"
#include "kernels/device/gemm_roles.cuh"
#include "kernels/device/rank_gemm_kernel.h"
#include "kernels/device/rank_launch.cuh"
#include "kernels/device/rank_tiles.h"
#include "kernels/ptx/elect.cuh"

namespace mk {

// Push buffers leave 192 KB for stages, of which the largest tile then has three.
template <GemmTile TILE, class Element, bool B_TRANSPOSED>
struct RankGemmConfig : GemmConfig<TILE.block_m, TILE.block_n, TILE.ping_pong, Element, false, B_TRANSPOSED> {
  static constexpr int NUM_STAGES = 192 * 1024 / RankGemmConfig::STAGE_BYTES;
};

template <class Config>
struct RankGemmStorage {
  MainloopStorage<Config> mainloop;
  EpilogueBuffers<1> epilogue[Config::NUM_CONSUMER_WARPS];
  PushStorage<NUM_PUSH_WARPS, PUSH_PIECE_BYTES> push;
  // Finished tiles, from the consumers to the push warps.
  uint64_t staged_full[NUM_STAGED_TILES];
  uint64_t staged_empty[NUM_STAGED_TILES];
};

// By one thread of the CTA, before a CTA-wide barrier.
template <class Config>
__device__ __forceinline__ void storage_init(RankGemmStorage<Config>& smem) {
  for (int slot = 0; slot < NUM_STAGED_TILES; ++slot) {
    ptx::mbarrier_init(&smem.staged_full[slot], Config::BLOCK_M / 16);
    ptx::mbarrier_init(&smem.staged_empty[slot], NUM_PUSH_WARPS);
  }
  push_init(smem.push);
  mainloop_init<Config>(smem.mainloop);
}

// Warps 1 to 3 of every CTA's producer warpgroup: the push warps, and one that never pushes.
constexpr int NUM_COPY_WARPS = NUM_PUSH_WARPS + 1;
struct CopyWarp {
  int warp;      // of the CTA's
  int num_ctas;  // that have copy warps
  __device__ bool pushes() const { return warp < NUM_PUSH_WARPS; }
  // The launch's one warp that meets the other ranks.
  __device__ bool greets() const { return blockIdx.x == 0 && warp == NUM_PUSH_WARPS; }
  // Of all CTAs' copy warps; neighbours are in different CTAs.
  __device__ int index() const { return warp * num_ctas + blockIdx.x; }
};

// The warps of a CTA, one of `num_ctas` that compute, part here, once and for all. produce() runs on one
// thread, copy(warp) on NUM_COPY_WARPS warps, consume(warpgroup) on the consumer warpgroups. Where a kernel is
// so large that the compiler would call consume(), or who calls it, they are marked always_inline: wgmmas on
// the other side of a call are run one by one (ptxas C7510).
template <class Config, class Produce, class Copy, class Consume>
__device__ __forceinline__ void run_roles(int num_ctas, Produce&& produce, Copy&& copy, Consume&& consume) {
  // A CTA keeps what it was launched with, 168 for each of 384 threads: what the producer's warpgroup gives
  // back is what the consumers can get, and an increase beyond it would wait for ever.
  constexpr int NUM_PRODUCER_REGISTERS = 72;
  constexpr int NUM_CONSUMER_REGISTERS = 216;
  static_assert(128 * (168 - NUM_PRODUCER_REGISTERS) >= 256 * (NUM_CONSUMER_REGISTERS - 168));
  constexpr bool DEAL_REGISTERS = Config::NUM_CONSUMER_WARPGROUPS > 1;
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (warpgroup == Config::NUM_CONSUMER_WARPGROUPS) {
    if constexpr (DEAL_REGISTERS) ptx::setmaxnreg_dec<NUM_PRODUCER_REGISTERS>();
    const int warp = __shfl_sync(~0u, threadIdx.x % 128 / 32, 0);
    if (warp == 0) {
      if (ptx::elect_one()) produce();
      __syncwarp();
    } else {
      copy(CopyWarp{warp - 1, num_ctas});
    }
  } else {
    if constexpr (DEAL_REGISTERS) ptx::setmaxnreg_inc<NUM_CONSUMER_REGISTERS>();
    // A number that the compiler knows keeps descriptors in uniform registers.
    consume(Config::NUM_CONSUMER_WARPGROUPS == 1 ? 0 : warpgroup);
  }
}

}  // namespace mk
