// SPDX-License-Identifier: MIT
// The mainloop of every product: one producer thread fills a ring of shared-memory stages by TMA, consumer
// warpgroups multiply out of it with wgmma. Operators compose their kernels from these two roles.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "kernels/device/tile_scheduler.h"
#include "kernels/ptx/mbarrier.cuh"
#include "kernels/ptx/tma.cuh"
#include "kernels/ptx/wgmma.cuh"

namespace mk {

// A tile of BLOCK_M x BLOCK_N is multiplied by BLOCK_M / 64 warpgroups of 64 rows each, and loaded by one thread
// of a further warpgroup. A is [M, K] row-major, or [K, M] if A_TRANSPOSED; B is [K, N], or [N, K] if
// B_TRANSPOSED. wgmma takes either order from shared memory, so no operand is ever transposed by hand.
template <int BLOCK_M_, int BLOCK_N_, class Element_, bool A_TRANSPOSED_, bool B_TRANSPOSED_>
struct GemmConfig {
  using Element = Element_;
  static constexpr int BLOCK_M = BLOCK_M_;
  static constexpr int BLOCK_N = BLOCK_N_;
  static constexpr int BLOCK_K = 64;  // 128 bytes: the widest swizzle
  static constexpr bool A_TRANSPOSED = A_TRANSPOSED_;
  static constexpr bool B_TRANSPOSED = B_TRANSPOSED_;
  static constexpr int NUM_CONSUMER_WARPGROUPS = BLOCK_M / 64;
  static constexpr int NUM_CONSUMER_WARPS = NUM_CONSUMER_WARPGROUPS * 4;
  static constexpr int NUM_THREADS = 128 * (NUM_CONSUMER_WARPGROUPS + 1);
  static constexpr int A_STAGE_BYTES = BLOCK_M * BLOCK_K * 2;
  static constexpr int B_STAGE_BYTES = BLOCK_N * BLOCK_K * 2;
  static constexpr int STAGE_BYTES = A_STAGE_BYTES + B_STAGE_BYTES;
  // 192 KB of stages leave 32 KB of 227 for the epilogue.
  static constexpr int NUM_STAGES = 196608 / STAGE_BYTES;
};

template <class Config>
struct alignas(1024) MainloopStorage {
  uint8_t a[Config::NUM_STAGES][Config::A_STAGE_BYTES];
  uint8_t b[Config::NUM_STAGES][Config::B_STAGE_BYTES];
  uint64_t stage_full[Config::NUM_STAGES];
  uint64_t stage_empty[Config::NUM_STAGES];
};

// A cluster's CTAs hold neighbouring tiles of M and share B: each loads its part and multicasts it.
struct ClusterPosition {
  uint32_t cta_rank;
  uint32_t num_ctas;
};

template <int NUM_STAGES>
struct StageCursor {
  int stage = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == NUM_STAGES) {
      stage = 0;
      phase ^= 1;
    }
  }
};

__device__ __forceinline__ void mbarrier_wait(uint64_t* barrier, uint32_t phase) {
  while (!ptx::mbarrier_try_wait_parity(barrier, phase)) {
  }
}

// By one thread of the CTA; a cluster barrier must follow before any stage is used.
template <class Config>
__device__ void mainloop_init(MainloopStorage<Config>& smem, const ClusterPosition& cluster) {
  for (int stage = 0; stage < Config::NUM_STAGES; ++stage) {
    ptx::mbarrier_init(&smem.stage_full[stage], 1);
    // A stage is written by every CTA of the cluster, so every CTA's consumers free it everywhere.
    ptx::mbarrier_init(&smem.stage_empty[stage], Config::NUM_CONSUMER_WARPS * cluster.num_ctas);
  }
  ptx::fence_mbarrier_init_release_cluster();
}

// The hook of a product whose A is there before the launch.
struct AIsReady {
  __device__ __forceinline__ void operator()(const TileWork&, int /*k_step*/) const {}
};

template <class Config>
__device__ __forceinline__ void load_a_stage(MainloopStorage<Config>& smem, int stage, const CUtensorMap* map_a,
                                             int m, int k) {
  if constexpr (Config::A_TRANSPOSED) {
#pragma unroll
    for (int i = 0; i < Config::BLOCK_M / 64; ++i) {
      ptx::cp_async_bulk_tensor_2d_shared_global(smem.a[stage] + i * 64 * 128, map_a, &smem.stage_full[stage],
                                                 m + i * 64, k);
    }
  } else {
    ptx::cp_async_bulk_tensor_2d_shared_global(smem.a[stage], map_a, &smem.stage_full[stage], k, m);
  }
}

template <class Config>
__device__ __forceinline__ void load_b_stage(MainloopStorage<Config>& smem, int stage, const CUtensorMap* map_b,
                                             int n, int k, const ClusterPosition& cluster) {
  uint64_t* full = &smem.stage_full[stage];
  const uint16_t all_ctas = static_cast<uint16_t>((1u << cluster.num_ctas) - 1);
  if constexpr (Config::B_TRANSPOSED) {
    if (cluster.num_ctas == 1) {
      ptx::cp_async_bulk_tensor_2d_shared_global(smem.b[stage], map_b, full, k, n);
    } else {
      const int rows = Config::BLOCK_N / cluster.num_ctas;
      const int row = cluster.cta_rank * rows;
      ptx::cp_async_bulk_tensor_2d_shared_global_multicast_cluster(smem.b[stage] + row * 128, map_b, full, k,
                                                                   n + row, all_ctas);
    }
  } else {
#pragma unroll
    for (int i = 0; i < Config::BLOCK_N / 64; ++i) {
      if (cluster.num_ctas == 1) {
        ptx::cp_async_bulk_tensor_2d_shared_global(smem.b[stage] + i * 64 * 128, map_b, full, n + i * 64, k);
      } else if (i % cluster.num_ctas == cluster.cta_rank) {
        ptx::cp_async_bulk_tensor_2d_shared_global_multicast_cluster(smem.b[stage] + i * 64 * 128, map_b, full,
                                                                     n + i * 64, k, all_ctas);
      }
    }
  }
}

// Producer, one thread. `m_tile` is the CTA's own; `wait_for_a(work, k_step)` returns when A's part for that
// step may be loaded (it ends with a fence.proxy.async if it polled a flag). B is asked for first:
// it never waits.
template <class Config, class WaitForA>
__device__ __forceinline__ void load_tile(MainloopStorage<Config>& smem, StageCursor<Config::NUM_STAGES>& cursor,
                                          const CUtensorMap* map_a, const CUtensorMap* map_b, int m_tile,
                                          const TileWork& work, const ClusterPosition& cluster,
                                          WaitForA&& wait_for_a) {
  const int m = m_tile * Config::BLOCK_M;
  const int n = work.n_tile * Config::BLOCK_N;
  for (int k_step = work.k_begin; k_step < work.k_end; ++k_step) {
    mbarrier_wait(&smem.stage_empty[cursor.stage], cursor.phase ^ 1);
    ptx::mbarrier_arrive_expect_tx(&smem.stage_full[cursor.stage], Config::STAGE_BYTES);
    load_b_stage<Config>(smem, cursor.stage, map_b, n, k_step * Config::BLOCK_K, cluster);
    wait_for_a(work, k_step);
    load_a_stage<Config>(smem, cursor.stage, map_a, m, k_step * Config::BLOCK_K);
    cursor.advance();
  }
}

template <class Config>
__device__ __forceinline__ void release_stage(MainloopStorage<Config>& smem, int stage,
                                              const ClusterPosition& cluster) {
  const uint32_t lane = threadIdx.x % 32;
  if (cluster.num_ctas == 1) {
    if (lane == 0) ptx::mbarrier_arrive(&smem.stage_empty[stage]);
  } else if (lane < cluster.num_ctas) {
    ptx::mbarrier_arrive_shared_cluster(&smem.stage_empty[stage], lane);
  }
}

template <class Config, bool IS_FIRST_STAGE>
__device__ __forceinline__ void multiply_stage(float (&accumulators)[Config::BLOCK_N / 2], uint64_t descriptor_a,
                                               uint64_t descriptor_b) {
  // From one k of 16 to the next: 32 bytes along a swizzled row, or 16 rows of 128 bytes.
  constexpr uint64_t A_K16_ADVANCE = (Config::A_TRANSPOSED ? 16 * 128 : 32) >> 4;
  constexpr uint64_t B_K16_ADVANCE = (Config::B_TRANSPOSED ? 32 : 16 * 128) >> 4;
  ptx::wgmma_fence();
#pragma unroll
  for (int k16 = 0; k16 < Config::BLOCK_K / 16; ++k16) {
    ptx::wgmma_mma_async_k16<typename Config::Element, Config::A_TRANSPOSED ? 1 : 0, Config::B_TRANSPOSED ? 0 : 1>(
        accumulators, descriptor_a + k16 * A_K16_ADVANCE, descriptor_b + k16 * B_K16_ADVANCE,
        k16 > 0 || !IS_FIRST_STAGE);
  }
  ptx::wgmma_commit_group();
}

// Consumer, one warpgroup: its 64 rows of the tile into `accumulators` (zero without any k-step).
// One stage's products stay in flight while the next stage's are issued, and a stage is freed a step later.
template <class Config>
__device__ __forceinline__ void multiply_tile(float (&accumulators)[Config::BLOCK_N / 2],
                                              MainloopStorage<Config>& smem,
                                              StageCursor<Config::NUM_STAGES>& cursor, int num_k_steps,
                                              int warpgroup, const ClusterPosition& cluster) {
  // 64 rows of A and, where B's rows are N, 64 columns of B are blocks of 8,192 bytes.
  constexpr uint32_t BLOCK_64_BYTES = 64 * 128;
  const uint64_t base_a = ptx::wgmma_descriptor_swizzle_128b(
      ptx::smem_address(smem.a[0]) + warpgroup * BLOCK_64_BYTES, BLOCK_64_BYTES, 1024);
  const uint64_t base_b =
      ptx::wgmma_descriptor_swizzle_128b(ptx::smem_address(smem.b[0]), BLOCK_64_BYTES, 1024);
  const auto multiply = [&]<bool IS_FIRST_STAGE>() {
    mbarrier_wait(&smem.stage_full[cursor.stage], cursor.phase);
    multiply_stage<Config, IS_FIRST_STAGE>(accumulators, base_a + cursor.stage * (Config::A_STAGE_BYTES >> 4),
                                           base_b + cursor.stage * (Config::B_STAGE_BYTES >> 4));
  };
  if (num_k_steps > 0) {
    // The first stage stands apart: it overwrites the accumulators, and a run-time switch for that inside the
    // loop makes the compiler serialise the wgmmas.
    multiply.template operator()<true>();
    int previous_stage = cursor.stage;
    cursor.advance();
    for (int i = 1; i < num_k_steps; ++i) {
      multiply.template operator()<false>();
      ptx::wgmma_wait_group<1>();
      release_stage<Config>(smem, previous_stage, cluster);
      previous_stage = cursor.stage;
      cursor.advance();
    }
    ptx::wgmma_wait_group<0>();
    release_stage<Config>(smem, previous_stage, cluster);
  } else {
#pragma unroll
    for (int i = 0; i < Config::BLOCK_N / 2; ++i) accumulators[i] = 0.0f;
  }
}

}  // namespace mk
