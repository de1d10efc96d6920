// SPDX-License-Identifier: MIT
// The product of expert rows, each expert's with its weights, as both mixture-of-experts kernels have it, and
// the memory that their roles share.
#pragma once

#include <algorithm>

#include "kernels/device/ctas_in_step.cuh"
#include "kernels/device/grouped_tiles.h"
#include "kernels/device/load_params.h"
#include "kernels/device/rank_gemm.cuh"
#include "kernels/device/tile_tickets.cuh"
#include "kernels/ops/moe_routing/cuda_routing.cuh"
#include "kernels/ops/moe_routing/row_segments.h"

namespace mk::moe {

template <class Config>
struct ProductStorage {
  MainloopStorage<Config> mainloop;
  EpilogueBuffers<1> epilogue[Config::NUM_CONSUMER_WARPS];
  uint32_t num_ready;  // tiles whose rows are here, in the order of the walk
};

// A CTA's shared memory: the first phase's and then its role's, some of which are the operator's own, and what
// both know.
template <class Config, class Tables, class... OwnRoles>
struct ExpertStorage {
  static constexpr size_t ROLE_BYTES =
      std::max({sizeof(ProductStorage<Config>), sizeof(PushCtaStorage<Config::NUM_THREADS>),
                sizeof(CountingStorage<Config::NUM_THREADS>), sizeof(OwnRoles)...});
  alignas(1024) uint8_t role[ROLE_BYTES];
  Tables tables;
  RoutingDecision decision;

  __device__ ProductStorage<Config>& product() { return *reinterpret_cast<ProductStorage<Config>*>(role); }
  __device__ PushCtaStorage<Config::NUM_THREADS>& push() {
    return *reinterpret_cast<PushCtaStorage<Config::NUM_THREADS>*>(role);
  }
  __device__ CountingStorage<Config::NUM_THREADS>& counting() {
    return *reinterpret_cast<CountingStorage<Config::NUM_THREADS>*>(role);
  }
};

// The first row of a consumer warp's 16.
__device__ __forceinline__ int warp_row(const GroupedTile& work, int block) {
  return work.row + block * 64 + static_cast<int>(threadIdx.x % 128 / 32) * 16;
}

// By all threads of a CTA that computes.
template <class Config>
__device__ __forceinline__ void product_init(ProductStorage<Config>& smem) {
  if (threadIdx.x == 0) {
    smem.num_ready = 0;
    mainloop_init<Config>(smem.mainloop);
  }
  __syncthreads();
}

template <class Config>
__device__ __forceinline__ void load_weights_stage(MainloopStorage<Config>& smem, int stage,
                                                   const CUtensorMap* map_w, int n, int k, int expert) {
  uint64_t* full = &smem.stage_full[stage];
  if constexpr (Config::B_TRANSPOSED) {
    ptx::cp_async_bulk_tensor_3d_shared_global(smem.b[stage], map_w, full, k, n, expert);
  } else {
#pragma unroll
    for (int i = 0; i < (Config::BLOCK_N + 63) / 64; ++i) {
      ptx::cp_async_bulk_tensor_3d_shared_global(smem.b[stage] + i * 64 * 128, map_w, full, n + i * 64, k,
                                                 expert);
    }
  }
}

// An expert's tiles share its weights; of low tiles, there is one an expert and column.
template <class Config>
__device__ __forceinline__ CtasInStep ctas_in_step(const RankComm& comm, int num_ctas) {
  constexpr int NEAR_K_STEPS = 4;
  return {&comm.state->num_near, num_ctas, Config::IS_LARGE ? NEAR_K_STEPS : 0};
}

// Low tiles have each a column of weights to themselves: they are handed out as CTAs come for them. Others
// share theirs, and a CTA's are known beforehand.
template <class Config>
constexpr bool DEALS_TILES = !Config::IS_LARGE;

// How many k-steps before a tile's end the next one is taken: what it takes to see that its rows are here.
constexpr int TAKEN_K_STEPS_AHEAD = 12;

// A CTA's `ordinal`-th tile, as others than the warp that takes it learn of it; `feed` then is a TileFeed.
template <class Config, class Passes, class Feed>
__device__ __forceinline__ bool next_work(GroupedTileCursor<Passes>& cursor, const Feed& feed, uint32_t ordinal,
                                          GroupedTile* work) {
  if constexpr (DEALS_TILES<Config>) return cursor.find(next_tile(feed, ordinal), work);
  return cursor.next(work);
}

// Another warp looks at the flags, a lane each, ahead of the producer, whose time a flag's latency would cost.
constexpr uint32_t ALL_READY = 0x7fffffff;
__device__ __forceinline__ void pass_ready(uint32_t& num_ready, uint32_t value) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) {
    __threadfence_block();
    *static_cast<volatile uint32_t*>(&num_ready) = value;
  }
}

// What a producer knows of its tiles' rows: what that warp has told it, or that they are there.
class WatchedRows {
 public:
  __device__ explicit WatchedRows(const uint32_t& num_ready) : num_ready_(num_ready) {}
  __device__ __forceinline__ bool are_here(int ordinal) const {
    return ptx::ld_volatile(&num_ready_) > static_cast<uint32_t>(ordinal);
  }
  __device__ __forceinline__ void wait(int ordinal) const {
    while (!are_here(ordinal)) {
    }
    __threadfence_block();
    // TMA is another proxy than the loads that saw the flags.
    ptx::fence_proxy_async_global();
  }

 private:
  const uint32_t& num_ready_;
};
struct RowsAreHere {
  __device__ bool are_here(int /*ordinal*/) const { return true; }
  __device__ void wait(int /*ordinal*/) const {}
};

// Between two stages of weights that a CTA asks for while its first rows are on their way. Memory is idle then,
// but all at once would hold the rows up.
constexpr uint64_t FIRST_WEIGHTS_PACE_NS = 500;

// Producer, one thread: rows from `row` of `map_rows` on, once they are here, but for the first weights.
// Of a low tile, which has few as a rule, no more than there are.
// at_k_step(k_step) comes with the loads of each.
template <class Config, class Rows, class AtKStep>
__device__ __forceinline__ void load_expert_tile(MainloopStorage<Config>& smem,
                                                 StageCursor<Config::NUM_STAGES>& cursor,
                                                 const CUtensorMap* map_rows, int row, const CUtensorMap* map_w,
                                                 const GroupedTile& work, const CtasInStep& in_step,
                                                 const Rows& rows, AtKStep&& at_k_step) {
  const int n = work.n_tile * Config::BLOCK_N;
  const StageBoxes boxes =
      stage_boxes<expert_box_rows(Config::BLOCK_M)>(work.row_end - work.row, Config::BLOCK_M);
  const uint32_t bytes = boxes.bytes() + Config::B_STAGE_BYTES;
  const auto load_weights = [&](int stage, int k_step) {
    ptx::mbarrier_arrive_expect_tx(&smem.stage_full[stage], bytes);
    load_weights_stage<Config>(smem, stage, map_w, n, k_step * Config::BLOCK_K, work.group);
  };
  const bool is_whole = work.is_whole();  // parts come last, and have no next tile to begin together
  int asked_end = work.k_begin;           // of the weights
  if (work.ordinal == 0) {                // all stages are free
    const int ring_end = min(work.k_begin + Config::NUM_STAGES, work.k_end);
    for (uint64_t next = ptx::globaltimer(); asked_end < ring_end && !rows.are_here(0);) {
      if (ptx::globaltimer() < next) continue;
      next += FIRST_WEIGHTS_PACE_NS;
      load_weights(asked_end - work.k_begin, asked_end);
      ++asked_end;
    }
  }
  for (int k_step = work.k_begin; k_step < work.k_end; ++k_step) {
    if (k_step >= asked_end) {
      mbarrier_wait(&smem.stage_empty[cursor.stage], cursor.phase ^ 1);
      load_weights(cursor.stage, k_step);
    }
    if (k_step == work.k_begin) {
      rows.wait(work.ordinal);
      if (is_whole) {
        if (work.ordinal == 0) in_step.begin();
        in_step.await_others(work.ordinal);
      }
    }
    if (is_whole) in_step.at_k_step(k_step, 0, work.k_end);
    at_k_step(k_step);
    load_a_stage<Config>(smem, cursor.stage, map_rows, boxes, row, k_step * Config::BLOCK_K);
    cursor.advance();
  }
}

template <class Params>
struct ExpertKernel {
  void (*kernel)(Params);
  int num_threads;
  int smem_bytes;
};
template <class Params>
struct ExpertTable {
  // tile; weights as [k, n] or as [n, k]
  ExpertKernel<Params> entries[NUM_CUDA_TILES][2];
};

}  // namespace mk::moe
