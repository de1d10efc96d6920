// SPDX-License-Identifier: MIT
// Tiles whose inner dimension the CTAs of a cluster share: each leaves what it has in the others' shared
// memory, and they add it up in the order of k, each a part of the tile. CTAs with tiles of their own that
// share an operand (GemmCluster) are in the same cluster, or the only ones there.
#pragma once

#include "kernels/device/deferred_rows.cuh"
#include "kernels/device/gemm_epilogue.cuh"
#include "kernels/device/gemm_mainloop.cuh"
#include "kernels/device/swapped_epilogue.cuh"
#include "kernels/device/tile_scheduler.h"
#include "kernels/device/trace.cuh"
#include "kernels/gemm/gemm_plan.h"
#include "kernels/ptx/cluster.cuh"

namespace mk {

// A tile is shared out in chunks of columns of 16 rows, a slab. A chunk's partial sums come to its CTA: of each
// source, of each 64 rows, register quadruple i of thread t at i * 128 + t.
template <class Config>
struct SplitChunks {
  static constexpr int NUM = Config::BLOCK_N / SPLIT_CHUNK_COLUMNS;
  static constexpr int NUM_QUADRUPLES = SPLIT_CHUNK_COLUMNS / 8;
  static constexpr int NUM_BLOCKS = Config::BLOCK_M / 64;
  int num_ctas;

  __device__ int owner(int chunk, int slab) const { return (chunk + slab) % num_ctas; }
  // Of the slab's chunks from the `group`-th `num_ctas` on; NUM and beyond: there is none.
  __device__ int chunk_of(int owner, int slab, int group) const {
    return group * num_ctas + (owner + num_ctas - slab % num_ctas) % num_ctas;
  }
  __device__ int num_groups() const { return (NUM + num_ctas - 1) / num_ctas; }
  // Those with rows, of which there are so many from the tile's first on.
  __device__ static int num_slabs(int rows_left) { return (max(0, min(Config::BLOCK_M, rows_left)) + 15) / 16; }
  static constexpr int bytes(int num_ctas) {
    return (NUM + num_ctas - 1) / num_ctas * num_ctas * NUM_BLOCKS * NUM_QUADRUPLES * 128 * 16;
  }
  __device__ int offset(int chunk, int source, int block, int thread) const {
    return (((chunk / num_ctas * num_ctas + source) * NUM_BLOCKS + block) * NUM_QUADRUPLES * 128 + thread) * 16;
  }
};

// Tiles of 256 rows leave no room for others' partial sums.
template <class Config>
constexpr bool CAN_SPLIT = Config::BLOCK_N % SPLIT_CHUNK_COLUMNS == 0 && Config::NUM_ROW_BLOCKS == 1;

template <class Config>
constexpr bool split_chunks_fit() {
  if constexpr (CAN_SPLIT<Config>) {
    for (int num_ctas = 2; num_ctas <= MAX_SPLIT_CTAS; ++num_ctas) {
      if (SplitChunks<Config>::bytes(num_ctas) > Config::NUM_STAGES * Config::STAGE_BYTES) return false;
    }
  }
  return true;
}

// What this CTA is of those that share a tile, and where these are in the cluster.
template <class Config>
struct SplitPlace {
  static constexpr int STRIDE = Config::NUM_SHARING_CTAS;
  int first;  // CTA of the cluster
  int index;

  __device__ SplitPlace() {
    const int rank = static_cast<int>(ptx::cluster_ctarank());
    first = rank % STRIDE;
    index = rank / STRIDE;
  }
  __device__ int cta_rank(int of_index) const { return first + of_index * STRIDE; }
};

// The tile of this CTA, and its part of k; the schedule's tiles are a cluster's.
template <class Config>
__device__ __forceinline__ TileWork split_work(const TileSchedule& schedule, const SplitPlace<Config>& place,
                                               int num_ctas) {
  constexpr int STRIDE = SplitPlace<Config>::STRIDE;
  TileWork work{};
  schedule.place(static_cast<int>(blockIdx.x) / (num_ctas * STRIDE), &work.m_tile, &work.n_tile);
  int& tile = Config::CLUSTER.n > 1 ? work.n_tile : work.m_tile;
  tile = tile * STRIDE + place.first;
  work.k_begin = place.index * schedule.num_k_steps / num_ctas;
  work.k_end = (place.index + 1) * schedule.num_k_steps / num_ctas;
  return work;
}

// By one thread of the CTA; a barrier must follow, the cluster's, if CTAs share what they load.
template <class Config>
__device__ __forceinline__ void split_init(MainloopStorage<Config>& smem) {
  ptx::mbarrier_init(&smem.partials_full, 1);
  mainloop_init<Config>(smem);
}

// By all threads of a warp, for the compiler must not take it for parted before the mainloop
// (store_tile_rows()); one thread says how much comes to this CTA.
template <class Config>
__device__ __forceinline__ void expect_partials(MainloopStorage<Config>& smem,
                                                const SplitChunks<Config>& chunks, int num_slabs, int index) {
  constexpr int BYTES_OF_CHUNK = SplitChunks<Config>::NUM_QUADRUPLES * 32 * 16;  // of a slab, from one source
  // Of as many slabs as there are CTAs, each has all chunks once.
  int num_chunks = num_slabs / chunks.num_ctas * chunks.NUM;
#pragma unroll
  for (int slab = 0; slab < MAX_SPLIT_CTAS - 1; ++slab) {
    const int first = chunks.chunk_of(index, slab, 0);
    const int of_slab = (chunks.NUM + chunks.num_ctas - 1 - first) / chunks.num_ctas;
    num_chunks += slab < num_slabs % chunks.num_ctas ? of_slab : 0;
  }
  const uint32_t bytes = num_chunks * chunks.num_ctas * BYTES_OF_CHUNK;
  if (threadIdx.x == 0) ptx::mbarrier_arrive_expect_tx(&smem.partials_full, bytes);
}

// 16 rows of each 64 a warp: every chunk to its CTA.
template <class Config>
__device__ __forceinline__ void send_partials(MainloopStorage<Config>& smem, const SplitChunks<Config>& chunks,
                                              const SplitPlace<Config>& place, int block,
                                              const float (&accumulators)[Config::BLOCK_N / 2]) {
  constexpr int NUM_QUADRUPLES = SplitChunks<Config>::NUM_QUADRUPLES;
  const uint32_t base = ptx::smem_address(&smem);
  const uint32_t barrier = ptx::smem_address(&smem.partials_full);
  const int slab = block * 4 + threadIdx.x % 128 / 32;
#pragma unroll
  for (int chunk = 0; chunk < SplitChunks<Config>::NUM; ++chunk) {
    const int owner = place.cta_rank(chunks.owner(chunk, slab));
    const uint32_t to =
        ptx::mapa_shared_cluster(base + chunks.offset(chunk, place.index, block, threadIdx.x % 128), owner);
    const uint32_t barrier_of_owner = ptx::mapa_shared_cluster(barrier, owner);
#pragma unroll
    for (int i = 0; i < NUM_QUADRUPLES; ++i) {
      const float* from = accumulators + 4 * (chunk * NUM_QUADRUPLES + i);
      ptx::st_async_shared_cluster_v4(to + i * 128 * 16, make_float4(from[0], from[1], from[2], from[3]),
                                      barrier_of_owner);
    }
  }
}

// Adds up 16 rows of a chunk, in the order of k.
template <class Config>
__device__ __forceinline__ void add_partials(MainloopStorage<Config>& smem, const SplitChunks<Config>& chunks,
                                             int chunk, int slab, float (&sums)[SPLIT_CHUNK_COLUMNS / 2]) {
  constexpr int NUM_QUADRUPLES = SplitChunks<Config>::NUM_QUADRUPLES;
#pragma unroll
  for (int i = 0; i < 4 * NUM_QUADRUPLES; ++i) sums[i] = 0.0f;
#pragma unroll 2
  for (int source = 0; source < chunks.num_ctas; ++source) {
    const auto* from = reinterpret_cast<const float4*>(
        reinterpret_cast<const uint8_t*>(&smem) +
        chunks.offset(chunk, source, slab / 4, slab % 4 * 32 + threadIdx.x % 32));
#pragma unroll
    for (int i = 0; i < NUM_QUADRUPLES; ++i) {
      const float4 partial = from[i * 128];
      sums[4 * i] += partial.x;
      sums[4 * i + 1] += partial.y;
      sums[4 * i + 2] += partial.z;
      sums[4 * i + 3] += partial.w;
    }
  }
}

// A product in tiles that clusters of `num_ctas` share; m and n are those of the tiles: swapped, m counts the
// output's columns and n its rows.
struct SplitProduct {
  int m;
  int n;
  int tile_columns;  // from one tile to the next
  int num_ctas;
  TraceBuffer* trace;
};

// What a plain product does with its tiles. `buffers`: of the CTA's warps; swapped tiles need none.
template <bool IS_SWAPPED>
struct StoreToC {
  const EpilogueParams& epilogue;
  EpilogueBuffers<1>* buffers;
  int m_end;

  // A warp's 16 rows of a tile, from (m, n) on, as far as columns lie before `n_end`.
  template <int NUM_ACCUMULATORS>
  __device__ __forceinline__ void operator()(float (&accumulators)[NUM_ACCUMULATORS], int m, int n,
                                             int n_end) const {
    if constexpr (IS_SWAPPED) {
      store_tile_columns(accumulators, epilogue, n, n_end, m);
    } else {
      store_tile_rows(accumulators, epilogue, buffers[threadIdx.x / 32], m, m_end, n);
    }
  }
};

// Consumer warps: this CTA's chunks of the tile.
template <class Config, class Store>
__device__ __forceinline__ void finish_chunks(MainloopStorage<Config>& smem, const SplitProduct& product,
                                              const SplitChunks<Config>& chunks, const TileWork& work,
                                              int index, const Store& store) {
  const int first_row = work.m_tile * Config::BLOCK_M;
  const int num_slabs = chunks.num_slabs(product.m - first_row);
  for (int unit = threadIdx.x / 32; unit < num_slabs * chunks.num_groups();
       unit += Config::NUM_CONSUMER_WARPS) {
    const int slab = unit % num_slabs;
    const int chunk = chunks.chunk_of(index, slab, unit / num_slabs);
    const int first_column = work.n_tile * product.tile_columns;
    const int n_end = min(product.n, first_column + product.tile_columns);
    const int column = first_column + chunk * SPLIT_CHUNK_COLUMNS;
    if (chunk >= SplitChunks<Config>::NUM || column >= n_end) continue;
    float sums[SPLIT_CHUNK_COLUMNS / 2];
    add_partials(smem, chunks, chunk, slab, sums);
    store(sums, first_row + slab * 16, column, n_end);
  }
}

// A consumer warpgroup, which gives what it has finished to `store`, as StoreToC takes it. The stages hold,
// when all CTAs have multiplied, partial sums; the other warps of the CTA call meet_split().
template <class Config, class Store>
__device__ __forceinline__ void consume_split(MainloopStorage<Config>& smem, const SplitProduct& product,
                                              const TileWork& work, const SplitPlace<Config>& place,
                                              int warpgroup, const Store& store) {
  const SplitChunks<Config> chunks = {product.num_ctas};
  const Tracer tracer(product.trace, TRACE_COMPUTE + warpgroup);
  tracer.begin(TraceKind::compute, trace_tile(work));
  StageCursor<Config::NUM_STAGES> stages;
  // While the first operands are on their way.
  expect_partials(smem, chunks, chunks.num_slabs(product.m - work.m_tile * Config::BLOCK_M), place.index);
  typename Config::Accumulators accumulators;
  const int first_block = warpgroup * Config::NUM_ROW_BLOCKS;
  NothingDeferred nothing;
  multiply_tile<Config>(
      accumulators, smem, stages, work.k_end - work.k_begin, first_block, [] {}, nothing);
  tracer.end();
  tracer.begin(TraceKind::store, trace_tile(work));
  const int first_row =
      work.m_tile * Config::BLOCK_M + first_block * 64 + static_cast<int>(threadIdx.x) % 128 / 32 * 16;
  if constexpr (Config::IN_CLUSTERS) {
    if (product.num_ctas == 1) {
      const int first_column = work.n_tile * product.tile_columns;
#pragma unroll
      for (int block = 0; block < Config::NUM_ROW_BLOCKS; ++block) {
        store(accumulators[block], first_row + block * 64, first_column,
              min(product.n, first_column + product.tile_columns));
      }
      tracer.end();
      return;
    }
  }
  // Nobody multiplies out of the stages any more.
  cluster_meet();
  if constexpr (CAN_SPLIT<Config>) {
    if (first_row < product.m) send_partials(smem, chunks, place, warpgroup, accumulators[0]);
    mbarrier_wait(&smem.partials_full, 0);
    finish_chunks<Config>(smem, product, chunks, work, place.index, store);
  }
  tracer.end();
}

// The other warps of a CTA.
__device__ __forceinline__ void meet_split(int num_ctas) {
  if (num_ctas > 1) cluster_meet();
}

}  // namespace mk
