// SPDX-License-Identifier: MIT
// MoE GEMM + combine as one persistent kernel: all CTAs learn who has how many rows, then some compute each
// expert's tiles, and in the end sum this rank's tokens, while others push finished rows home.
#pragma once

#include "kernels/ops/moe_gemm_combine/cuda_push.cuh"
#include "kernels/ops/moe_gemm_combine/cuda_sums.cuh"
#include "kernels/ops/moe_routing/cuda_product.cuh"
#include "kernels/ptx/tensor_map.cuh"

namespace mk::moe_gemm_combine {

using CudaTable = moe::ExpertTable<CudaParams>;
const CudaTable& cuda_kernels_bf16();
const CudaTable& cuda_kernels_fp16();

// A CTA's tiles where they are dealt out; otherwise they take no room.
template <bool ARE_DEALT>
struct CtaTiles {
  struct Feed {};
  Feed feed;
};
template <>
struct CtaTiles<true> {
  TileFeed feed;
  uint32_t num_published;  // of the feed's tiles
};

template <class Config>
struct Storage : moe::ExpertStorage<Config, Tables, SumStorage> {
  alignas(128) CUtensorMap map_rows;
  std::byte* products;  // where finished rows go; in memory, for the consumers' registers are few
  uint32_t num_stored[Config::NUM_CONSUMER_WARPS];  // tiles of each consumer warp
  [[no_unique_address]] CtaTiles<moe::DEALS_TILES<Config>> tiles;
  __device__ OnePass passes() const { return {}; }
  __device__ SumStorage& sums() { return *reinterpret_cast<SumStorage*>(this->role); }
};

__device__ __forceinline__ GroupedTiles tiles_of(const CudaParams& params, const Tables& tables, int block_m) {
  return {tables.rows,
          params.routing.num_experts(params.routing.rank),
          block_m,
          params.num_n_tiles,
          params.num_k_steps,
          params.group_m,
          params.num_compute_ctas};
}

// Named barrier of the consumers, when stages have no use any more; those below are the mainloop's.
constexpr int SUMS_BARRIER = 7;

// This CTA's map of the caller's rows, in device memory.
__device__ __forceinline__ CUtensorMap* own_map(const CudaParams& params) {
  return reinterpret_cast<CUtensorMap*>(params.comm.staging + (blockIdx.x + 1) * STAGING_BYTES) - 1;
}

// By one warp: a map that ends with the last row, since what lies behind it may not be read.
__device__ __forceinline__ void make_map(const CudaParams& params, const Tables& tables,
                                         CUtensorMap& smem_map) {
  const int lane = threadIdx.x % 32;
  static_assert(sizeof(CUtensorMap) == 32 * 4);
  reinterpret_cast<uint32_t*>(&smem_map)[lane] = reinterpret_cast<const uint32_t*>(&params.map_rows)[lane];
  __syncwarp();
  const uint32_t rows = tables.rows[params.routing.num_experts(params.routing.rank)];
  if (lane == 0) ptx::tensormap_replace_global_dim_1(&smem_map, max(rows, 1u));
  __syncwarp();
  ptx::tensormap_cp_fenceproxy_release_gpu(own_map(params), &smem_map);
}

template <class Config, class Feed, class Passes>
__device__ __forceinline__ void produce(moe::ProductStorage<Config>& smem, Feed& feed, const CudaParams& params,
                                        const Tables& tables, const Passes& passes) {
  const CUtensorMap* map_rows = own_map(params);
  ptx::fence_proxy_tensormap_acquire_gpu(map_rows);
  ptx::prefetch_tensormap(&params.map_w);
  const GroupedTiles tiles = tiles_of(params, tables, Config::BLOCK_M);
  GroupedTileCursor cursor(tiles, passes, blockIdx.x);
  StageCursor<Config::NUM_STAGES> stages;
  const CtasInStep in_step = moe::ctas_in_step<Config>(params.comm, params.num_compute_ctas);
  GroupedTile work;
  for (uint32_t ordinal = 0; moe::next_work<Config>(cursor, feed, ordinal, &work); ++ordinal) {
    const Tracer tracer(params.comm.trace, TRACE_LOAD);
    tracer.begin(TraceKind::load, trace_tile(work));
    const int near = max(work.k_end - moe::TAKEN_K_STEPS_AHEAD, 0);
    moe::load_expert_tile<Config>(smem.mainloop, stages, map_rows, work.row, &params.map_w, work, in_step,
                                  moe::RowsAreHere(), [&](int k_step) {
                                    if constexpr (moe::DEALS_TILES<Config>) {
                                      if (k_step == near) near_end(feed, ordinal);
                                    }
                                  });
    tracer.end();
  }
  in_step.leave();
}

// What a consumer warp has stored, or does not have, of its tiles, told to the warp that publishes them. By all
// its threads alike: a branch that parts the warp in the mainloop has its descriptors in vector registers.
class StoredTiles {
 public:
  __device__ explicit StoredTiles(uint32_t& num_stored) : num_stored_(num_stored) {}
  __device__ __forceinline__ void add() { ++count_; }
  __device__ __forceinline__ void publish() const {
    __syncwarp();
    __threadfence_block();
    *static_cast<volatile uint32_t*>(&num_stored_) = count_;
  }

 private:
  uint32_t& num_stored_;
  uint32_t count_ = 0;
};

// A consumer warp's rows of finished tiles: where both warpgroups finish a tile together, and nothing else
// would be multiplied while they store it, they are stored, and then published, beside the products of the
// next.
template <class Config>
class FinishedRows {
  static constexpr bool ARE_DEFERRED = Config::NUM_CONSUMER_WARPGROUPS == 2;
  using Rows = DeferredRows<Config::BLOCK_N, 1>;

 public:
  static constexpr int NUM_PIECES = ARE_DEFERRED ? Rows::NUM_PIECES : 0;

  __device__ FinishedRows(EpilogueBuffers<1>& buffers, uint32_t& num_stored)
      : buffers_(buffers), rows_(buffers), tiles_(num_stored) {}

  // As store_tile_rows().
  __device__ __forceinline__ void add(float (&accumulators)[Config::BLOCK_N / 2], const EpilogueParams& params,
                                      int m, int m_end, int n) {
    tiles_.add();
    if constexpr (ARE_DEFERRED) {
      if (rows_.take(accumulators, params, m, m_end, n)) return;
    }
    store_tile_rows(accumulators, params, buffers_, m, m_end, n);
    tiles_.publish();
  }
  template <int PIECE>
  __device__ __forceinline__ void store() {
    rows_.template store<PIECE>();
    if constexpr (PIECE == NUM_PIECES - 1) tiles_.publish();
  }
  __device__ __forceinline__ void flush() {
    if constexpr (!ARE_DEFERRED) return;
    rows_.flush();
    tiles_.publish();
  }

 private:
  EpilogueBuffers<1>& buffers_;
  Rows rows_;
  StoredTiles tiles_;
};

// A warp's 16 rows of a product, rounded once, to where the push CTAs take them.
template <class Config>
__device__ __forceinline__ void finish_rows(const CudaParams& params, std::byte* products,
                                            const GroupedTile& work, int block,
                                            float (&accumulators)[Config::BLOCK_N / 2],
                                            FinishedRows<Config>& finished) {
  EpilogueParams output = params.products;
  output.c = products;
  finished.add(accumulators, output, moe::warp_row(work, block), work.row_end, work.n_tile * Config::BLOCK_N);
}

// The warp that takes a CTA's tiles, where they are dealt out: never so far ahead of the one that publishes
// them that the feed has forgotten its next.
template <class Config, class Passes>
__device__ __forceinline__ void take_tiles(const RankLaunch& launch, const CudaParams& params,
                                           Storage<Config>& storage, const Passes& passes) {
  if (threadIdx.x % 32 != 0) return;
  const GroupedTiles tiles = tiles_of(params, storage.tables, Config::BLOCK_M);
  GroupedTileCursor cursor(tiles, passes, blockIdx.x);
  GroupedTile work;
  uint32_t ordinal = 0;
  int tile = 0;
  do {
    await_near(storage.tiles.feed, ordinal);
    while (ordinal >= *static_cast<volatile uint32_t*>(&storage.tiles.num_published) + TileFeed::DEPTH)
      __nanosleep(100);
    tile = static_cast<int>(atomicAdd(&launch.progress().tile_ticket, 1u));
    feed_tile(storage.tiles.feed, ordinal, tile);
    ++ordinal;
  } while (cursor.find(tile, &work));
}

// The warp that tells the push CTAs of blocks that are complete; the consumers have no time for the fences
// that this takes.
template <class Config, class Passes>
__device__ __forceinline__ void publish_products(const RankLaunch& launch, const CudaParams& params,
                                                 Storage<Config>& storage, const Passes& passes) {
  const int lane = threadIdx.x % 32;
  const Tables& tables = storage.tables;
  const GroupedTiles tiles = tiles_of(params, tables, Config::BLOCK_M);
  GroupedTileCursor cursor(tiles, passes, blockIdx.x);
  GroupedTile work;
  for (uint32_t ordinal = 0; moe::next_work<Config>(cursor, storage.tiles.feed, ordinal, &work); ++ordinal) {
    const auto is_stored = [&] {
      return lane >= Config::NUM_CONSUMER_WARPS ||
             *static_cast<volatile uint32_t*>(&storage.num_stored[lane]) > ordinal;
    };
    while (!__all_sync(~0u, is_stored())) __nanosleep(100);
    __threadfence_block();
    __syncwarp();
    if (lane != 0) continue;
    if constexpr (moe::DEALS_TILES<Config>)
      *static_cast<volatile uint32_t*>(&storage.tiles.num_published) = ordinal + 1;
    // They are read by the bulk copy engine, another proxy than the one written through.
    ptx::fence_proxy_async_global();
    const int block = work.m_tile * Config::BLOCK_M / moe::BLOCK_ROWS;
    const int rows = min(moe::BLOCK_ROWS, tiles.first_row(work.group + 1) - tiles.first_row(work.group) -
                                              block * moe::BLOCK_ROWS);
    const uint32_t expected = params.num_n_tiles * ((rows + Config::BLOCK_M - 1) / Config::BLOCK_M);
    const int index = static_cast<int>(HALF_FLAGS + tables.blocks[work.group]) + block;
    uint32_t* count = &params.comm.state->counts[index];
    if (ptx::atom_acq_rel_gpu_add(count, 1) + 1 != expected) continue;
    ptx::st_relaxed_gpu(count, 0);
    ptx::fence_acq_rel_gpu();  // those who wait are on this GPU
    launch.raise_flag_relaxed(params.comm.rank, index);
  }
  __syncwarp();
}

// By all consumers, when they are through with their tiles.
template <class Config>
__device__ __forceinline__ void begin_sums(SumStorage& sums) {
  static_assert(sizeof(MainloopStorage<Config>::stage_full) + sizeof(MainloopStorage<Config>::stage_empty) <=
                sizeof(SumStorage::barriers_before));
  static_assert(offsetof(MainloopStorage<Config>, stage_full) == offsetof(SumStorage, barriers_before));
  ptx::barrier_sync(SUMS_BARRIER, 32 * Config::NUM_CONSUMER_WARPS);
  if (threadIdx.x == 0) sums_init(sums);
  ptx::barrier_sync(SUMS_BARRIER, 32 * Config::NUM_CONSUMER_WARPS);
}

// sum_own(buffers): what a consumer warp does when all of them are through with their tiles.
template <class Config, class AnyStorage, class SumOwn>
__device__ __forceinline__ void run_product_cta(const RankLaunch& launch, const CudaParams& params,
                                                AnyStorage& storage, SumOwn&& sum_own) {
  moe::ProductStorage<Config>& smem = storage.product();
  const Tables& tables = storage.tables;
  const auto passes = storage.passes();
  if (threadIdx.x < 32) make_map(params, tables, storage.map_rows);
  if (threadIdx.x == 0) {
    const uint32_t num_home_rows = tables.home_rows[params.routing.experts];
    storage.products = launch.area(params.comm.rank, params.layout.product_row(num_home_rows, 0));
  }
  if (threadIdx.x < Config::NUM_CONSUMER_WARPS) storage.num_stored[threadIdx.x] = 0;
  if constexpr (moe::DEALS_TILES<Config>) {
    if (threadIdx.x == 0) {
      feed_init(storage.tiles.feed);
      storage.tiles.num_published = 0;
    }
  }
  product_init(smem);
  run_roles<Config>(
      params.num_compute_ctas, [&] { produce<Config>(smem, storage.tiles.feed, params, tables, passes); },
      [&](const CopyWarp& warp) {
        if (warp.warp == 0) publish_products<Config>(launch, params, storage, passes);
        if constexpr (moe::DEALS_TILES<Config>) {
          if (warp.warp == 1) take_tiles<Config>(launch, params, storage, passes);
        }
      },
      [&](int warpgroup) __attribute__((always_inline)) {
        const GroupedTiles tiles = tiles_of(params, tables, Config::BLOCK_M);
        GroupedTileCursor cursor(tiles, passes, blockIdx.x);
        uint32_t num_tiles = 0;
        FinishedRows<Config> finished(smem.epilogue[threadIdx.x / 32], storage.num_stored[threadIdx.x / 32]);
        consumer_role<Config, GroupedTile, TilesAre::alike>(
            smem.mainloop, warpgroup, params.comm.trace,
            [&](GroupedTile* work) {
              return moe::next_work<Config>(cursor, storage.tiles.feed, num_tiles++, work);
            },
            [&](const GroupedTile& work, int block, float(&accumulators)[Config::BLOCK_N / 2]) {
              finish_rows<Config>(params, storage.products, work, block, accumulators, finished);
            },
            finished);
        begin_sums<Config>(storage.sums());
        sum_own(SumBuffers<Config::NUM_CONSUMER_WARPS>(storage.sums(), threadIdx.x / 32));
      });
}

template <class Config>
__global__ void __launch_bounds__(Config::NUM_THREADS, 1)
    moe_gemm_combine_kernel(const __grid_constant__ CudaParams params) {
  extern __shared__ __align__(1024) uint8_t smem_bytes[];
  Storage<Config>& smem = *reinterpret_cast<Storage<Config>*>(smem_bytes);
  const RankLaunch launch(params.comm);
  launch.begin_cta();
  moe::route(launch, params.comm, params.routing, smem.counting(), smem.decision,
             [&](int, int64_t received, int64_t sent) {
               return static_cast<size_t>(params.layout.bytes(received, sent));
             });
  if (smem.decision.has_counts && smem.decision.verdict.kind == moe::Verdict::go)
    fill_tables<Config::NUM_THREADS>(launch, params, smem.tables);
  if (moe::finish_routing(launch, params.comm, params.routing, smem.decision)) {
    if (static_cast<int>(blockIdx.x) >= params.num_compute_ctas) {
      push_cta_init(smem.push());
      push_products(launch, params, smem.tables, smem.push());
    } else {
      run_product_cta<Config>(launch, params, smem, [&](auto&& buffers) {
        sum_tokens(launch, params, params.num_compute_ctas * Config::NUM_CONSUMER_WARPS, buffers,
                   [&](int64_t token, TokenRows* rows) {
                     return find_rows(launch, params, smem.tables, token, rows);
                   });
      });
    }
  }
  launch.end_cta();
}

template <GemmTile TILE, class Element, bool B_TRANSPOSED>
constexpr moe::ExpertKernel<CudaParams> cuda_kernel_entry() {
  using Config = GemmConfig<TILE.block_m, TILE.block_n, TILE.ping_pong, Element, false, B_TRANSPOSED>;
  static_assert(sizeof(Storage<Config>) <= 227 * 1024);
  return {moe_gemm_combine_kernel<Config>, Config::NUM_THREADS, sizeof(Storage<Config>)};
}

template <class Element>
const CudaTable& cuda_kernel_table() {
  static const CudaTable table = []<size_t... TILES>(std::index_sequence<TILES...>) {
    return CudaTable{{{cuda_kernel_entry<moe::CUDA_TILES[TILES], Element, false>(),
                       cuda_kernel_entry<moe::CUDA_TILES[TILES], Element, true>()}...}};
  }
  (std::make_index_sequence<moe::NUM_CUDA_TILES>());
  return table;
}

}  // namespace mk::moe_gemm_combine
