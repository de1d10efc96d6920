// SPDX-License-Identifier: MIT
// The mainloop of every product: one producer thread fills a ring of shared-memory stages by TMA, consumer
// warpgroups multiply out of it with wgmma. Operators compose their kernels from these two roles.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <utility>

#include "kernels/device/gemm_cluster.h"
#include "kernels/device/load_params.h"
#include "kernels/device/tile_scheduler.h"
#include "kernels/ptx/cluster.cuh"
#include "kernels/ptx/mbarrier.cuh"
#include "kernels/ptx/tma.cuh"
#include "kernels/ptx/wgmma.cuh"

namespace mk {

// How two consumer warpgroups share the work. Cooperative: each has half of a tile's rows (of 64 there is but
// one), and both idle the tensor cores in their epilogue. Ping-pong: each has a whole tile, and one multiplies
// while the other is in its epilogue; the ring of stages hands them their tiles in turn.
template <int BLOCK_M_, int BLOCK_N_, bool PING_PONG_, class Element_, bool A_TRANSPOSED_, bool B_TRANSPOSED_,
          GemmCluster CLUSTER_ = GemmCluster{}, int STAGE_KB_ = BLOCK_M_ == 256 ? 208 : 192>
struct GemmConfig {
  using Element = Element_;
  static constexpr int BLOCK_M = BLOCK_M_;
  static constexpr int BLOCK_N = BLOCK_N_;
  static constexpr int BLOCK_K = 64;  // 128 bytes: the widest swizzle
  static constexpr bool PING_PONG = PING_PONG_;
  // A is [M, K] row-major, or [K, M]; B is [K, N], or [N, K]. wgmma takes either order from shared memory, so
  // no operand is ever transposed by hand.
  static constexpr bool A_TRANSPOSED = A_TRANSPOSED_;
  static constexpr bool B_TRANSPOSED = B_TRANSPOSED_;
  static constexpr GemmCluster CLUSTER = CLUSTER_;
  static_assert(CLUSTER.m == 1 || CLUSTER.n == 1);
  static constexpr int NUM_SHARING_CTAS = CLUSTER.m * CLUSTER.n;
  static constexpr bool IN_CLUSTERS = NUM_SHARING_CTAS > 1;
  // Of a large tile, which both warpgroups multiply and finish together: their CTAs are worth keeping in step.
  static constexpr bool IS_LARGE = !PING_PONG && BLOCK_M > 64;
  static_assert(!PING_PONG || BLOCK_M > 64);  // CAN_REHEARSE
  static constexpr int NUM_CONSUMER_WARPGROUPS = PING_PONG || BLOCK_M > 64 ? 2 : 1;
  // Of a warpgroup: wgmmas of 64 rows for one k of 16.
  static constexpr int NUM_ROW_BLOCKS = BLOCK_M / 64 / (PING_PONG ? 1 : NUM_CONSUMER_WARPGROUPS);
  static constexpr int NUM_CONSUMER_WARPS = NUM_CONSUMER_WARPGROUPS * 4;
  static constexpr int NUM_WARPS_PER_STAGE =
      (PING_PONG ? 4 : NUM_CONSUMER_WARPS) * NUM_SHARING_CTAS;  // that read, and free, a stage
  static constexpr int NUM_THREADS = 128 * (NUM_CONSUMER_WARPGROUPS + 1);
  static constexpr int A_STAGE_BYTES = BLOCK_M * BLOCK_K * 2;
  // Where N is contiguous, swizzled blocks are 64 columns wide, so that 160 and 224 load up to 32 columns too
  // many.
  static constexpr int B_STAGE_BYTES = (B_TRANSPOSED ? BLOCK_N : (BLOCK_N + 63) / 64 * 64) * BLOCK_K * 2;
  static constexpr int STAGE_BYTES = A_STAGE_BYTES + B_STAGE_BYTES;
  // 192 KB of stages leave 32 KB of 227 for the epilogue; the largest tile is short of stages and has 208.
  static constexpr int NUM_STAGES = STAGE_KB_ * 1024 / STAGE_BYTES;
  // A consumer thread's part of its warpgroup's rows.
  using Accumulators = float[NUM_ROW_BLOCKS][BLOCK_N / 2];
};

template <class Config>
struct alignas(1024) MainloopStorage {
  uint8_t a[Config::NUM_STAGES][Config::A_STAGE_BYTES];
  uint8_t b[Config::NUM_STAGES][Config::B_STAGE_BYTES];
  uint64_t stage_full[Config::NUM_STAGES];
  uint64_t stage_empty[Config::NUM_STAGES];
  uint64_t partials_full;  // of tiles whose inner dimension clusters share
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
  __device__ __forceinline__ void advance(int num_steps) {
    const int next = stage + num_steps;
    phase ^= next / NUM_STAGES & 1;
    stage = next % NUM_STAGES;
  }
};

__device__ __forceinline__ void mbarrier_wait(uint64_t* barrier, uint32_t phase) {
  while (!ptx::mbarrier_try_wait_parity(barrier, phase)) {
  }
}

// By one thread of the CTA; a barrier, in clusters the cluster's, must follow before any stage is used.
template <class Config>
__device__ void mainloop_init(MainloopStorage<Config>& smem) {
  for (int stage = 0; stage < Config::NUM_STAGES; ++stage) {
    ptx::mbarrier_init(&smem.stage_full[stage], 1);
    ptx::mbarrier_init(&smem.stage_empty[stage], Config::NUM_WARPS_PER_STAGE);
  }
  ptx::fence_mbarrier_init_release_cluster();
}

// All threads of the cluster are there. What they wrote is not ordered by it, but for barriers initialised
// before (mainloop_init): a release would be a barrier of all memory, a microsecond.
__device__ __forceinline__ void cluster_meet() {
  ptx::barrier_cluster_arrive_relaxed();
  ptx::barrier_cluster_wait_acquire();
}

// The hook of a product whose A is there before the launch.
struct AIsReady {
  __device__ __forceinline__ void operator()(int /*k_step*/) const {}
};

// What this CTA is of those that share an operand. Of a tile whose inner dimension is split, those of the same
// part of it follow one another in the cluster.
template <class Config>
struct SharingCtas {
  static constexpr int NUM = Config::NUM_SHARING_CTAS;
  int first;  // of the cluster's CTAs
  int index;  // this one among them

  __device__ __forceinline__ SharingCtas() {
    const int rank = static_cast<int>(ptx::cluster_ctarank());
    index = rank % NUM;
    first = rank - index;
  }
  __device__ __forceinline__ uint16_t mask() const { return static_cast<uint16_t>(((1 << NUM) - 1) << first); }
};

// The part of an operand that this CTA loads for all that share it: of its `length` rows where K is contiguous,
// of each block's of 64 columns where it is not.
template <class Config, bool K_IS_CONTIGUOUS>
__device__ __forceinline__ void load_shared_stage(uint8_t* to, uint64_t* full, const CUtensorMap* map,
                                                  const StageBoxes& boxes, int length, int first, int k) {
  const SharingCtas<Config> sharing;
  const uint16_t ctas = sharing.mask();
  if constexpr (K_IS_CONTIGUOUS) {
    const int row = min(sharing.index * boxes.rows, length - boxes.rows);
    ptx::cp_async_bulk_tensor_2d_shared_global_multicast(to + row * 128, map, full, k, first + row, ctas);
  } else {
    constexpr int BOX = Config::BLOCK_K / Config::NUM_SHARING_CTAS;
    const int row = sharing.index * BOX;
#pragma unroll 1
    for (int i = 0; i < boxes.num; ++i) {
      ptx::cp_async_bulk_tensor_2d_shared_global_multicast(to + (i * 64 + row) * 128, map, full, first + i * 64,
                                                           k + row, ctas);
    }
  }
}

template <class Config>
__device__ __forceinline__ void load_a_stage(MainloopStorage<Config>& smem, int stage, const CUtensorMap* map_a,
                                             const StageBoxes& boxes, int m, int k) {
  uint64_t* full = &smem.stage_full[stage];
  if constexpr (Config::CLUSTER.n > 1) {
    load_shared_stage<Config, !Config::A_TRANSPOSED>(smem.a[stage], full, map_a, boxes, Config::BLOCK_M, m, k);
  } else {
#pragma unroll(Config::IN_CLUSTERS ? 1 : 4)
    for (int i = 0; i < boxes.num; ++i) {
      const int row = i * boxes.rows;
      if constexpr (Config::A_TRANSPOSED) {
        ptx::cp_async_bulk_tensor_2d_shared_global(smem.a[stage] + row * 128, map_a, full, m + row, k);
      } else {
        ptx::cp_async_bulk_tensor_2d_shared_global(smem.a[stage] + row * 128, map_a, full, k, m + row);
      }
    }
  }
}

// `tile_columns`: see gemm_plan_tile_columns().
template <class Config>
__device__ __forceinline__ void load_b_stage(MainloopStorage<Config>& smem, int stage, const CUtensorMap* map_b,
                                             const StageBoxes& boxes, int n, int k,
                                             int tile_columns = Config::BLOCK_N) {
  uint64_t* full = &smem.stage_full[stage];
  if constexpr (Config::CLUSTER.m > 1) {
    load_shared_stage<Config, Config::B_TRANSPOSED>(smem.b[stage], full, map_b, boxes, tile_columns, n, k);
  } else {
#pragma unroll(Config::IN_CLUSTERS ? 1 : 4)
    for (int i = 0; i < boxes.num; ++i) {
      const int row = i * boxes.rows;
      if constexpr (Config::B_TRANSPOSED) {
        ptx::cp_async_bulk_tensor_2d_shared_global(smem.b[stage] + row * 128, map_b, full, k, n + row);
      } else {
        ptx::cp_async_bulk_tensor_2d_shared_global(smem.b[stage] + row * 128, map_b, full, n + row, k);
      }
    }
  }
}

// Where a tile's rows of A are: from row `first` of `map` on, `left` of them.
struct RowsOfA {
  const CUtensorMap* map;
  int first;
  int left;
};

// Producer, one thread. `wait_for_a(k_step)` returns when A's part for that step may be loaded (it ends with a
// fence.proxy.async if it polled a flag). B is asked for first: it never waits.
template <class Config, class WaitForA>
__device__ __forceinline__ void load_tile(MainloopStorage<Config>& smem,
                                          StageCursor<Config::NUM_STAGES>& cursor, const LoadParams& params,
                                          const RowsOfA& rows, const TileWork& work, WaitForA&& wait_for_a) {
  const int n = work.n_tile * Config::BLOCK_N;
  const StageBoxes a_boxes = a_stage_boxes<Config>(params, rows.left);
  const StageBoxes b_boxes = b_stage_boxes<Config>(params, n);
  const uint32_t bytes = a_boxes.bytes() + b_boxes.bytes();
  for (int k_step = work.k_begin; k_step < work.k_end; ++k_step) {
    mbarrier_wait(&smem.stage_empty[cursor.stage], cursor.phase ^ 1);
    ptx::mbarrier_arrive_expect_tx(&smem.stage_full[cursor.stage], bytes);
    load_b_stage<Config>(smem, cursor.stage, &params.map_b, b_boxes, n, k_step * Config::BLOCK_K);
    wait_for_a(k_step);
    load_a_stage<Config>(smem, cursor.stage, rows.map, a_boxes, rows.first, k_step * Config::BLOCK_K);
    cursor.advance();
  }
}

// A producer whose CTA ends: those that share operands with it have freed all stages here, too, and write to
// none any more.
template <class Config>
__device__ __forceinline__ void await_sharing_ctas(MainloopStorage<Config>& smem,
                                                   StageCursor<Config::NUM_STAGES>& cursor) {
  if constexpr (Config::IN_CLUSTERS) {
    for (int stage = 0; stage < Config::NUM_STAGES; ++stage) {
      mbarrier_wait(&smem.stage_empty[cursor.stage], cursor.phase ^ 1);
      cursor.advance();
    }
  }
}

// One of a tile's operands, of which `tile_columns` columns of B are the tile's own, where A is there before
// the launch and two threads of different warps load one each: in small tiles a k-step is as long as it takes
// one thread to ask for both. The one that loads B calls await_sharing_ctas() after its last tile.
template <class Config, bool IS_A>
__device__ __forceinline__ void load_operand(MainloopStorage<Config>& smem,
                                             StageCursor<Config::NUM_STAGES>& cursor, const LoadParams& params,
                                             const RowsOfA& rows, int tile_columns, const TileWork& work) {
  const int n = work.n_tile * tile_columns;
  const StageBoxes a_boxes = a_stage_boxes<Config>(params, rows.left);
  const StageBoxes b_boxes = b_stage_boxes<Config>(params, n, tile_columns);
  const uint32_t bytes = a_boxes.bytes() + b_boxes.bytes();
  for (int k_step = work.k_begin; k_step < work.k_end; ++k_step) {
    mbarrier_wait(&smem.stage_empty[cursor.stage], cursor.phase ^ 1);
    if constexpr (IS_A) {
      load_a_stage<Config>(smem, cursor.stage, rows.map, a_boxes, rows.first, k_step * Config::BLOCK_K);
    } else {
      ptx::mbarrier_arrive_expect_tx(&smem.stage_full[cursor.stage], bytes);
      load_b_stage<Config>(smem, cursor.stage, &params.map_b, b_boxes, n, k_step * Config::BLOCK_K,
                           tile_columns);
    }
    cursor.advance();
  }
}

// The same of a CTA that has one tile.
template <class Config, bool IS_A>
__device__ __forceinline__ void load_operand(MainloopStorage<Config>& smem, const LoadParams& params,
                                             const RowsOfA& rows, int tile_columns, const TileWork& work) {
  StageCursor<Config::NUM_STAGES> cursor;
  load_operand<Config, IS_A>(smem, cursor, params, rows, tile_columns, work);
  if constexpr (!IS_A) await_sharing_ctas<Config>(smem, cursor);
}

// load_tile() of a CTA's first tile, when all stages are free, where A is on its way: of B, as many stages are
// asked for before A is waited for.
template <class Config, class WaitForA>
__device__ __forceinline__ void load_first_tile(MainloopStorage<Config>& smem,
                                                StageCursor<Config::NUM_STAGES>& cursor,
                                                const LoadParams& params, const RowsOfA& rows,
                                                const TileWork& work, WaitForA&& wait_for_a) {
  const int n = work.n_tile * Config::BLOCK_N;
  const StageBoxes a_boxes = a_stage_boxes<Config>(params, rows.left);
  const StageBoxes b_boxes = b_stage_boxes<Config>(params, n);
  const uint32_t bytes = a_boxes.bytes() + b_boxes.bytes();
  TileWork rest = work;
  rest.k_begin =
      work.k_end - work.k_begin < Config::NUM_STAGES ? work.k_end : work.k_begin + Config::NUM_STAGES;
  for (int k_step = work.k_begin; k_step < rest.k_begin; ++k_step) {
    const int stage = k_step - work.k_begin;
    ptx::mbarrier_arrive_expect_tx(&smem.stage_full[stage], bytes);
    load_b_stage<Config>(smem, stage, &params.map_b, b_boxes, n, k_step * Config::BLOCK_K);
  }
  for (int k_step = work.k_begin; k_step < rest.k_begin; ++k_step) {
    wait_for_a(k_step);
    load_a_stage<Config>(smem, cursor.stage, rows.map, a_boxes, rows.first, k_step * Config::BLOCK_K);
    cursor.advance();
  }
  load_tile<Config>(smem, cursor, params, rows, rest, wait_for_a);
}

template <class Config>
__device__ __forceinline__ void release_stage(MainloopStorage<Config>& smem, int stage) {
  const int lane = threadIdx.x % 32;
  if constexpr (Config::IN_CLUSTERS) {
    // All of these write to the stage.
    const SharingCtas<Config> sharing;
    if (lane < sharing.NUM) ptx::mbarrier_arrive_shared_cluster(&smem.stage_empty[stage], sharing.first + lane);
  } else {
    if (lane == 0) ptx::mbarrier_arrive(&smem.stage_empty[stage]);
  }
}

// In a stage, 64 rows of A, and 64 columns of B where N is contiguous, are blocks of this size.
constexpr uint32_t BLOCK_64_BYTES = 64 * 128;

// The products of the stage's k of 16 from FIRST_K16 to LAST_K16.
template <class Config, int FIRST_K16, int LAST_K16, bool OVERWRITES>
__device__ __forceinline__ void multiply_stage(typename Config::Accumulators& accumulators,
                                               uint64_t descriptor_a, uint64_t descriptor_b) {
  // From one k of 16 to the next: 32 bytes along a swizzled row, or 16 rows of 128 bytes.
  constexpr uint64_t A_K16_ADVANCE = (Config::A_TRANSPOSED ? 16 * 128 : 32) >> 4;
  constexpr uint64_t B_K16_ADVANCE = (Config::B_TRANSPOSED ? 32 : 16 * 128) >> 4;
#pragma unroll
  for (int k16 = FIRST_K16; k16 <= LAST_K16; ++k16) {
#pragma unroll
    for (int block = 0; block < Config::NUM_ROW_BLOCKS; ++block) {
      ptx::wgmma_mma_async_k16<typename Config::Element, Config::A_TRANSPOSED ? 1 : 0,
                               Config::B_TRANSPOSED ? 0 : 1>(
          accumulators[block], descriptor_a + block * (BLOCK_64_BYTES >> 4) + k16 * A_K16_ADVANCE,
          descriptor_b + k16 * B_K16_ADVANCE, k16 > 0 || !OVERWRITES);
    }
  }
  ptx::wgmma_commit_group();
}

// Consumer, one warpgroup: its rows of the tile, from the `first_block`-th 64 on, into `accumulators` (zero
// without any k-step). `on_last_issued` is called when its last stage
// has arrived and the last wgmma is under way.
//
// The tensor cores take a warpgroup's wgmmas little ahead of executing them, so what lies between the last
// wgmma of a stage and the first of the next must be short. Hence the stage before is freed after the first k
// of 16 of this one, and the next stage's barrier is looked at before the last.
//
// `deferred` are rows of the tile before that are still to be stored (deferred_rows.cuh): a piece beside each
// of the second and following k-steps, or all at once where there are too few.
template <class Config, class OnLastIssued, class Deferred>
__device__ __forceinline__ void multiply_tile(typename Config::Accumulators& accumulators,
                                              MainloopStorage<Config>& smem,
                                              StageCursor<Config::NUM_STAGES>& cursor, int num_k_steps,
                                              int first_block, OnLastIssued&& on_last_issued,
                                              Deferred& deferred) {
  const uint64_t base_a = ptx::wgmma_descriptor_swizzle_128b(
      ptx::smem_address(smem.a[0]) + first_block * BLOCK_64_BYTES, BLOCK_64_BYTES, 1024);
  const uint64_t base_b =
      ptx::wgmma_descriptor_swizzle_128b(ptx::smem_address(smem.b[0]), BLOCK_64_BYTES, 1024);
  const auto a_of = [&](int stage) { return base_a + stage * (Config::A_STAGE_BYTES >> 4); };
  const auto b_of = [&](int stage) { return base_b + stage * (Config::B_STAGE_BYTES >> 4); };
  if (num_k_steps == 0) {
    on_last_issued();
    deferred.flush();
#pragma unroll
    for (int i = 0; i < Config::NUM_ROW_BLOCKS * Config::BLOCK_N / 2; ++i) {
      accumulators[i / (Config::BLOCK_N / 2)][i % (Config::BLOCK_N / 2)] = 0.0f;
    }
    return;
  }
  // The first stage stands apart: it overwrites the accumulators, and a run-time switch for that inside the
  // loop makes the compiler serialise the wgmmas.
  mbarrier_wait(&smem.stage_full[cursor.stage], cursor.phase);
  ptx::wgmma_fence();
  multiply_stage<Config, 0, 3, true>(accumulators, a_of(cursor.stage), b_of(cursor.stage));
  int previous_stage = cursor.stage;
  cursor.advance();
  bool is_full =
      num_k_steps > 1 && ptx::mbarrier_test_wait_parity(&smem.stage_full[cursor.stage], cursor.phase);
  const auto step = [&](bool has_next, auto&& beside) {
    const int stage = cursor.stage;
    if (!is_full) mbarrier_wait(&smem.stage_full[stage], cursor.phase);
    ptx::wgmma_fence();
    multiply_stage<Config, 0, 0, false>(accumulators, a_of(stage), b_of(stage));
    ptx::wgmma_wait_group<1>();
    release_stage<Config>(smem, previous_stage);
    previous_stage = stage;
    cursor.advance();
    multiply_stage<Config, 1, 2, false>(accumulators, a_of(stage), b_of(stage));
    beside();
    if (has_next) is_full = ptx::mbarrier_test_wait_parity(&smem.stage_full[cursor.stage], cursor.phase);
    multiply_stage<Config, 3, 3, false>(accumulators, a_of(stage), b_of(stage));
  };
  int first_step = 1;
  if constexpr (Deferred::NUM_PIECES > 0) {
    if (num_k_steps > Deferred::NUM_PIECES + 1) {
      [&]<int... PIECES>(std::integer_sequence<int, PIECES...>) {
        (step(true, [&] { deferred.template store<PIECES>(); }), ...);
      }
      (std::make_integer_sequence<int, Deferred::NUM_PIECES>());
      first_step += Deferred::NUM_PIECES;
    } else {
      deferred.flush();
    }
  }
  for (int i = first_step; i < num_k_steps; ++i) step(i + 1 < num_k_steps, [] {});
  on_last_issued();
  ptx::wgmma_wait_group<0>();
  release_stage<Config>(smem, previous_stage);
}

}  // namespace mk
