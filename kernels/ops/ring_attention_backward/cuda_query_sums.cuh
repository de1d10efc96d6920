// SPDX-License-Identifier: MIT
// Gradients of ring attention: how dQ is summed up in global memory, where each block of queries is a tile's at
// a time, and by whose turn (KeyTurnsOf).
#pragma once

#include "kernels/device/rank_launch.cuh"
#include "kernels/ops/ring_attention_backward/cuda_params.h"
#include "kernels/ptx/grid_dependency.cuh"
#include "kernels/ptx/mbarrier.cuh"
#include "kernels/ptx/memory.cuh"
#include "kernels/ptx/tma.cuh"

namespace mk::ring_attention_backward {

// A tile's turn with the dQ of a block of queries that streams past.
struct QueryTurn {
  int block;  // of all that the rank has
  int before;
  int turn;
};

// Turns on their way from the producer to the warps that add, in shared memory. Nobody waits for room: whoever
// puts one knows that it is there. With them where sums and their turns lie: those warps have no registers to
// keep it in, and what the compiler puts into local memory comes from the L2 (see ProducerState).
template <int NUM_TURNS>
struct QueryTurns {
  QueryTurn turns[NUM_TURNS];
  uint32_t num_put;
  uint32_t has_ended;
  std::byte* sums;       // of the first block
  uint32_t* last_turns;  // that blocks have had

  // By one thread, before a CTA-wide barrier.
  template <class Params>
  __device__ __forceinline__ void begin(const RankLaunch& launch, const Params& params) {
    num_put = has_ended = 0;
    const QuerySumPlaces places = params.panels.query_sums();
    sums = launch.area(params.comm.rank, places.sums(0));
    last_turns = reinterpret_cast<uint32_t*>(launch.area(params.comm.rank, places.turn(0)));
  }

  __device__ __forceinline__ void put(const QueryTurn& turn) {
    turns[num_put % NUM_TURNS] = turn;
    __threadfence_block();
    *static_cast<volatile uint32_t*>(&num_put) = num_put + 1;
  }
  __device__ __forceinline__ void end() {
    __threadfence_block();
    *static_cast<volatile uint32_t*>(&has_ended) = 1;
  }
  // Until the turn `number` is known. False: there is none.
  __device__ __forceinline__ bool await(uint32_t number) const {
    while (true) {
      const bool is_last_look = *static_cast<const volatile uint32_t*>(&has_ended) != 0;
      __threadfence_block();
      if (*static_cast<const volatile uint32_t*>(&num_put) > number) break;
      if (is_last_look) return false;
      __nanosleep(50);
    }
    __threadfence_block();
    return true;
  }
  __device__ __forceinline__ const volatile QueryTurn& turn(uint32_t number) const {
    return turns[number % NUM_TURNS];
  }
};

// Blocks of queries are rounded some at a time: fewer where there are few, so that every CTA has some.
__device__ __forceinline__ int chunk_blocks(int64_t num_blocks) {
  constexpr int MOST_BLOCKS = 8, CHUNKS = 512;
  return num_blocks >= MOST_BLOCKS * CHUNKS ? MOST_BLOCKS : most(1, static_cast<int>(num_blocks) / CHUNKS);
}

template <class Params>
__device__ __forceinline__ int num_query_chunks(const Params& params) {
  const int64_t num_blocks = params.panels.row_places().num_blocks();
  const int of_chunk = chunk_blocks(num_blocks);
  return static_cast<int>((num_blocks + of_chunk - 1) / of_chunk);
}

// use(block, its number) of those of a chunk that there are; block.head is of all batches.
template <class Params, class Use>
__device__ __forceinline__ void for_each_block(const Params& params, int chunk, Use&& use) {
  const QueryRowPlaces places = params.panels.row_places();
  const auto& slices = params.tiles.slices;
  const int rank = params.comm.rank;
  const int of_chunk = chunk_blocks(places.num_blocks());
#pragma unroll 1
  for (int i = 0; i < of_chunk; ++i) {
    const int number = chunk * of_chunk + i;
    if (number >= places.num_blocks()) return;
    const int of_run = number / places.run_blocks;
    const int index = number - of_run * places.run_blocks;
    const int head = of_run / places.num_runs;
    const int run = of_run - head * places.num_runs;
    const int from = index * BLOCK_ROWS, count = slices.count(rank, run);
    if (from >= count) continue;
    use(QueryBlock{head, run, index, slices.first_row(rank, run) + from, slices.begin(rank, run) + from,
                   least(BLOCK_ROWS, count - from)},
        number);
  }
}

// Until `turn` is over with a block, whose last one is `word`; acquires what it left. Whose turn it is may
// itself wait for keys; so that wait's deadline, which says more, comes first.
template <class Params>
__device__ __forceinline__ void await_turn(const RankLaunch& launch, const Params& params, const uint32_t* word,
                                           int64_t block, int turn) {
  if (ptx::ld_acquire_gpu(word) >= static_cast<uint32_t>(turn)) return;
  uint64_t since = ptx::globaltimer();
  for (int polls = 1; ptx::ld_relaxed_gpu(word) < static_cast<uint32_t>(turn); ++polls) {
    if (polls % POLLS_PER_LOOK != 0) continue;
    if (launch.stopped()) return;
    if (!launch.is_overdue(since, 2 * params.comm.wait_timeout_ns)) continue;
    launch.report_overdue({DeviceRole::reduce, DeviceObject::reduced_tile, params.comm.rank,
                           static_cast<uint64_t>(block), ptx::ld_relaxed_gpu(word),
                           static_cast<uint64_t>(turn)});
    return;
  }
  ptx::ld_acquire_gpu(word);
}

// By one thread of two, of which each takes every other block: adds what consumers have staged to the blocks'
// sums, each in its tile's turn. The first turn with a block is a store. While a block's sums are on their way
// the other thread has the next block; and a turn that has come is known before its sums are there.
template <class Params, class Storage>
__device__ __forceinline__ void add_to_queries(const RankLaunch& launch, const Params& params, Storage& smem,
                                               int which) {
  constexpr int BLOCK_BYTES = sizeof(smem.attention.staged);
  const auto& turns = smem.turns;
  ptx::await_previous_grid();  // from when on no block has had a turn
  for (uint32_t number = which; turns.await(number); number += 2) {
    const auto& turn = turns.turn(number);
    const bool is_first = turn.before == 0;
    if (!is_first) {
      await_turn(launch, params, turns.last_turns + turn.block, turn.block, turn.before);
      ptx::fence_proxy_async_global();  // the sums were, and are, written by the bulk copy engine
    }
    std::byte* const sums = turns.sums + int64_t{turn.block} * BLOCK_BYTES;
    while (!ptx::mbarrier_try_wait_parity(&smem.joint.staged_full[which], number / 2 % 2)) {
    }
    if (is_first) {
      ptx::cp_async_bulk_global_shared(sums, smem.attention.staged, BLOCK_BYTES);
    } else {
      ptx::cp_reduce_async_bulk_add_f32_global_shared(sums, smem.attention.staged, BLOCK_BYTES);
    }
    ptx::cp_async_bulk_commit_group();
    ptx::cp_async_bulk_wait_group_read<0>();
    ptx::mbarrier_arrive(&smem.joint.staged_empty);
    ptx::cp_async_bulk_wait_group<0>();
    ptx::st_release_gpu(turns.last_turns + turn.block, static_cast<uint32_t>(turn.turn));
  }
}

}  // namespace mk::ring_attention_backward
