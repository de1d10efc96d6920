// SPDX-License-Identifier: MIT
// What the kernels of the GEMM operators have in common: a product's roles, and beside them, in the producer's
// warpgroup, three warps that move data.
#pragma once

#include <utility>

#include "kernels/device/gemm_epilogue.cuh"
#include "kernels/device/gemm_roles.cuh"
#include "kernels/device/rank_gemm_tiles.h"
#include "kernels/device/rank_launch.cuh"
#include "kernels/device/rank_tiles.h"

namespace mk {

template <class Config>
struct RankGemmStorage {
  MainloopStorage<Config> mainloop;
  EpilogueBuffers epilogue[Config::NUM_CONSUMER_WARPS];
};

// Warps 1 to 3 of every CTA's producer warpgroup.
constexpr int NUM_COPY_WARPS = 3;
struct CopyWarp {
  int index;  // of all CTAs'
  int count;
  __device__ bool is_first() const { return index == 0; }
};

// The warps of a CTA part here, once and for all. produce() runs on one thread, copy(warp) on NUM_COPY_WARPS
// warps, consume(warpgroup) on the consumer warpgroups.
template <class Config, class Produce, class Copy, class Consume>
__device__ __forceinline__ void run_roles(Produce&& produce, Copy&& copy, Consume&& consume) {
  // 65,536 registers: 224 for each of 256 consumer threads, 64 for each of the other 128.
  constexpr bool DEAL_REGISTERS = Config::NUM_CONSUMER_WARPGROUPS > 1;
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (warpgroup == Config::NUM_CONSUMER_WARPGROUPS) {
    if constexpr (DEAL_REGISTERS) ptx::setmaxnreg_dec<64>();
    const int warp = __shfl_sync(~0u, threadIdx.x % 128 / 32, 0);
    if (warp == 0) {
      if (threadIdx.x % 32 == 0) produce();
      __syncwarp();
    } else {
      copy(CopyWarp{static_cast<int>(blockIdx.x) * NUM_COPY_WARPS + warp - 1,
                    static_cast<int>(gridDim.x) * NUM_COPY_WARPS});
    }
  } else {
    if constexpr (DEAL_REGISTERS) ptx::setmaxnreg_inc<224>();
    consume(warpgroup);
  }
}

// Counts a warp's part of a chunk as done, when all its lanes have written it; true on the last of `expected`,
// which then sees what the others wrote and may tell a peer.
__device__ __forceinline__ bool arrive(uint32_t* count, uint32_t expected) {
  __syncwarp();
  bool is_last = false;
  if (threadIdx.x % 32 == 0) {
    is_last = ptx::atom_acq_rel_gpu_add(count, 1) + 1 == expected;
    if (is_last) ptx::st_relaxed_gpu(count, 0);
  }
  return __shfl_sync(~0u, is_last, 0);
}

template <class Params>
struct RankGemmKernel {
  void (*kernel)(Params);
  int num_threads;
  int smem_bytes;
  int stage_bytes;
};
template <class Params>
struct RankGemmTable {
  // tile; B as [k, n] or as [n, k]
  RankGemmKernel<Params> entries[NUM_RANK_GEMM_TILES][2];
};

}  // namespace mk
