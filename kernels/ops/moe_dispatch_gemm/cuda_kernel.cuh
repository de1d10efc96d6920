// SPDX-License-Identifier: MIT
// MoE dispatch + GEMM as one persistent kernel: all CTAs route, then some push rows, and the others compute
// each expert's tiles as the rows arrive; of few rows, those that have pushed all compute as well.
#pragma once

#include "kernels/device/copy_rows.cuh"
#include "kernels/device/gemm_partials.cuh"
#include "kernels/ops/moe_dispatch_gemm/cuda_push.cuh"
#include "kernels/ops/moe_routing/cuda_product.cuh"

namespace mk::moe_dispatch_gemm {

using CudaTable = moe::ExpertTable<CudaParams>;
const CudaTable& cuda_kernels_bf16();
const CudaTable& cuda_kernels_fp16();

template <class Config>
struct Storage : moe::ExpertStorage<Config, Tables> {
  moe::Turns turns;
  TileFeed feed;
  __device__ OnePass passes() const { return {}; }
};

template <class Config>
__device__ __forceinline__ GroupedTiles tiles_of(const CudaParams& params, const Tables& tables) {
  const moe::CudaRouting& routing = params.routing;
  const int first = routing.first_expert(routing.rank);
  const int num_experts = routing.num_experts(routing.rank);
  GroupedTiles tiles = {tables.rows + first, num_experts,    Config::BLOCK_M,        params.num_n_tiles,
                        params.num_k_steps,  params.group_m, params.num_compute_ctas};
  if constexpr (!moe::DEALS_TILES<Config>) {
    int num_row_tiles = 0;
    if constexpr (Config::BLOCK_M == moe::BLOCK_ROWS) {
      num_row_tiles = static_cast<int>(tables.blocks[first + num_experts] - tables.blocks[first]);
    } else {  // emulated tiles are lower
      for (int local = 0; local < num_experts; ++local) num_row_tiles += tiles.num_m_tiles(local);
    }
    tiles.cut = CutTiles(num_row_tiles * params.num_n_tiles, params.num_k_steps, params.num_compute_ctas);
  }
  return tiles;
}

// By a whole warp: waits for the rows of a block of a local expert, a lane for each source.
__device__ __forceinline__ bool wait_block(const RankLaunch& launch, const CudaParams& params,
                                           const Tables& tables, DeviceRole role, int local_expert, int block) {
  const moe::CudaRouting& routing = params.routing;
  const int lane = threadIdx.x % 32;
  const int first = routing.first_expert(routing.rank);
  const int expert = first + local_expert;
  const moe::Counts counts(routing, launch.area(routing.rank, 0));
  const uint32_t rows = lane < routing.nranks ? counts.expert_rows(lane, expert) : 0;
  uint32_t sum = rows;
  for (int distance = 1; distance < 32; distance *= 2) {
    const uint32_t other = __shfl_up_sync(~0u, sum, distance);
    if (lane >= distance) sum += other;
  }
  bool is_there = true;
  if (RowSegment{sum - rows, rows}.in_block(block).count > 0) {
    const uint32_t of_rank = tables.blocks[expert] - tables.blocks[first] + block;
    is_there = launch.wait_flag(params.first_flag + lane * params.blocks_per_source + static_cast<int>(of_rank),
                                role, DeviceObject::row_block, lane, of_rank);
  }
  return __all_sync(~0u, is_there);
}

// The warp that is ahead of the producer.
template <class Config, class Passes>
__device__ __forceinline__ void watch_rows(const RankLaunch& launch, const CudaParams& params,
                                           const Tables& tables, const Passes& passes, TileFeed& feed,
                                           uint32_t& num_ready) {
  const bool is_first = threadIdx.x % 32 == 0;
  const GroupedTiles tiles = tiles_of<Config>(params, tables);
  GroupedTileCursor cursor(tiles, passes, blockIdx.x);
  GroupedTile work;
  uint32_t num_tiles = 0;
  const auto next = [&] {
    if constexpr (!moe::DEALS_TILES<Config>) return cursor.next(&work);
    int tile = 0;
    if (is_first) {
      await_near(feed, num_tiles);
      tile = static_cast<int>(atomicAdd(&launch.progress().tile_ticket, 1u));
      feed_tile(feed, num_tiles, tile);
    }
    ++num_tiles;
    return cursor.find(__shfl_sync(~0u, tile, 0), &work);
  };
  while (next()) {
    const int block = work.m_tile * Config::BLOCK_M / moe::BLOCK_ROWS;
    if (!wait_block(launch, params, tables, DeviceRole::compute, work.group, block)) {
      if (moe::DEALS_TILES<Config> && is_first) feed_tile(feed, num_tiles, NO_TILE);
      break;
    }
    moe::pass_ready(num_ready, work.ordinal + 1);
  }
  moe::pass_ready(num_ready, moe::ALL_READY);
}

template <class Config, class Passes>
__device__ __forceinline__ void produce(const RankLaunch& launch, moe::ProductStorage<Config>& smem,
                                        TileFeed& feed, const CudaParams& params, const Tables& tables,
                                        const Passes& passes) {
  const CUtensorMap* map_rows = &params.map_rows[launch.bank()];
  ptx::prefetch_tensormap(map_rows);
  ptx::prefetch_tensormap(&params.map_w);
  const GroupedTiles tiles = tiles_of<Config>(params, tables);
  GroupedTileCursor cursor(tiles, passes, blockIdx.x);
  StageCursor<Config::NUM_STAGES> stages;
  const CtasInStep in_step = moe::ctas_in_step<Config>(params.comm, params.num_compute_ctas);
  GroupedTile work;
  for (uint32_t ordinal = 0; moe::next_work<Config>(cursor, feed, ordinal, &work); ++ordinal) {
    const Tracer tracer(params.comm.trace, TRACE_LOAD);
    tracer.begin(TraceKind::load, trace_tile(work));
    const int near = max(work.k_end - moe::TAKEN_K_STEPS_AHEAD, 0);
    moe::load_expert_tile<Config>(smem.mainloop, stages, map_rows, work.row, &params.map_w, work, in_step,
                                  moe::WatchedRows(smem.num_ready), [&](int k_step) {
                                    if (moe::DEALS_TILES<Config> && k_step == near) near_end(feed, ordinal);
                                  });
    tracer.end();
  }
  in_step.leave();
}

// What came beside a consumer warp's 16 rows, a lane's: asked for before the tile's last products are through.
class RowOrigins {
 public:
  __device__ RowOrigins(const RankLaunch& launch, const CudaParams& params)
      : origins_(reinterpret_cast<const int4*>(launch.area(params.comm.rank, params.layout.origin(0)))) {}

  // By all threads of a warp alike, without a branch.
  __device__ __forceinline__ void fetch() {
    const int row = min(row_ + static_cast<int>(threadIdx.x % 16), row_end_ - 1);
    words_ = __ldcg(origins_ + max(row, 0));  // from the L2: other SMs, and peers, have written it
  }
  __device__ __forceinline__ void expect(int row, int row_end) {
    row_ = row;
    row_end_ = row_end;
  }
  __device__ __forceinline__ const RowOrigin& origin() const {
    return reinterpret_cast<const RowOrigin&>(words_);
  }

 private:
  const int4* origins_;
  int row_ = 0;
  int row_end_ = 0;
  int4 words_ = {};
};

// Of tiles that are cut: a partial tile in the second half of a CTA's staging memory, since in the first
// another CTA may still read counts (cta_rows()).
template <class Config>
__device__ __forceinline__ PartialsLayout partials_layout() {
  static_assert(moe::MAX_COUNTING_CTAS * moe::CUDA_MAX_EXPERTS * sizeof(uint32_t) <= STAGING_BYTES / 2);
  static_assert(Config::BLOCK_M * Config::BLOCK_N * sizeof(float) <= STAGING_BYTES / 2);
  PartialsLayout layout(PartialsLayout::MAX_CTAS, Config::BLOCK_M, Config::BLOCK_N);
  layout.flags_bytes += STAGING_BYTES / 2;
  layout.tile_bytes = STAGING_BYTES;
  return layout;
}

// By all warps of a warpgroup: false if another CTA finishes the tile, which then has this one's partial tile;
// else with the partial tiles of its peers the accumulators are whole. `has_rows`: the warp's 16 rows are in
// the tile.
template <class Config>
__device__ __forceinline__ bool join_parts(const RankComm& comm, const GroupedTile& work, int block,
                                           float (&accumulators)[Config::BLOCK_N / 2], bool has_rows) {
  if constexpr (moe::DEALS_TILES<Config>) return true;
  if (!work.is_owner) {
    partials_store(accumulators, partials_layout<Config>(), comm.partials, blockIdx.x, block, has_rows);
    return false;
  }
  if (work.num_peers > 0) {
    partials_add(
        accumulators, partials_layout<Config>(), comm.partials,
        [&](int peer) { return work.first_peer + peer * work.peer_stride; }, work.num_peers, block, has_rows);
  }
  return true;
}

// A warp's 16 rows of a product, scaled, into y; with the first tile of a row, its place in the record.
template <class Config>
__device__ __forceinline__ void finish_rows(const CudaParams& params, moe::ProductStorage<Config>& smem,
                                            const GroupedTile& work, int block,
                                            float (&accumulators)[Config::BLOCK_N / 2],
                                            const RowOrigin& origin) {
  const int lane = threadIdx.x % 32;
  const int row = moe::warp_row(work, block);
  if (!join_parts<Config>(params.comm, work, block, accumulators, row < work.row_end)) return;
  if (!__any_sync(~0u, row < work.row_end)) return;  // by a vote: see store_tile_rows()
  if (work.n_tile == 0 && params.routing.writes_record && lane < 16 && row + lane < work.row_end) {
    auto* rows =
        moe::RecordView{params.routing.record}.at<mk_moe_row_t>(params.routing.record_layout().rows_offset());
    rows[row + lane] = {origin.rank, origin.token, origin.k};
  }
  const float first_factor = __shfl_sync(~0u, origin.factor, lane / 4);
  const float second_factor = __shfl_sync(~0u, origin.factor, lane / 4 + 8);
#pragma unroll
  for (int i = 0; i < Config::BLOCK_N / 2; ++i) accumulators[i] *= i % 4 < 2 ? first_factor : second_factor;
  store_tile_rows(accumulators, params.epilogue, smem.epilogue[threadIdx.x / 32], row, work.row_end,
                  work.n_tile * Config::BLOCK_N);
}

// Brings the rows that have come to where the caller wants them; one of `num_warps`.
__device__ __forceinline__ void copy_dispatched(const RankLaunch& launch, const CudaParams& params,
                                                const Tables& tables, int warp, int num_warps) {
  constexpr int PIECE_ROWS = 16;
  constexpr int PIECES = moe::BLOCK_ROWS / PIECE_ROWS;
  const moe::CudaRouting& routing = params.routing;
  const int first = routing.first_expert(routing.rank);
  const int num_experts = routing.num_experts(routing.rank);
  const int num_pieces = static_cast<int>(tables.blocks[first + num_experts] - tables.blocks[first]) * PIECES;
#pragma unroll 1
  for (int idx = warp; idx < num_pieces; idx += num_warps) {
    const int local = moe::find_interval(tables.blocks + first, num_experts, idx / PIECES);
    const int block = idx / PIECES - static_cast<int>(tables.blocks[first + local] - tables.blocks[first]);
    const int rows = static_cast<int>(tables.rows[first + local + 1] - tables.rows[first + local]);
    const int begin = block * moe::BLOCK_ROWS + idx % PIECES * PIECE_ROWS;
    if (begin >= rows) continue;
    if (!wait_block(launch, params, tables, DeviceRole::gather, local, block)) return;
    const int64_t row = tables.rows[first + local] - tables.rows[first] + begin;
    const Tracer tracer(params.comm.trace, trace_track());
    tracer.begin(TraceKind::copy, idx);
    copy_rows({params.dispatched_rows + row * params.dispatched_pitch,
               launch.area(params.comm.rank, params.layout.row(row)), params.dispatched_pitch,
               params.layout.row_bytes, min_of(PIECE_ROWS, rows - begin), params.layout.row_bytes});
    tracer.end();
  }
}

// By all threads of a CTA.
template <class Config, class AnyStorage>
__device__ __forceinline__ void run_product_cta(const RankLaunch& launch, const CudaParams& params,
                                                AnyStorage& storage) {
  moe::ProductStorage<Config>& smem = storage.product();
  const Tables& tables = storage.tables;
  TileFeed& feed = storage.feed;
  const auto passes = storage.passes();
  if (moe::DEALS_TILES<Config> && threadIdx.x == 0) feed_init(feed);
  product_init(smem);
  run_roles<Config>(
      params.num_compute_ctas, [&] { produce<Config>(launch, smem, feed, params, tables, passes); },
      [&](const CopyWarp& warp) {
        if (warp.warp == 0) {
          watch_rows<Config>(launch, params, tables, passes, feed, smem.num_ready);
        } else if (params.dispatched_rows != nullptr && static_cast<int>(blockIdx.x) < warp.num_ctas) {
          copy_dispatched(launch, params, tables, (warp.warp - 1) * warp.num_ctas + blockIdx.x,
                          (NUM_COPY_WARPS - 1) * warp.num_ctas);
        }
      },
      [&](int warpgroup) __attribute__((always_inline)) {
        const GroupedTiles tiles = tiles_of<Config>(params, tables);
        GroupedTileCursor cursor(tiles, passes, blockIdx.x);
        uint32_t num_tiles = 0;
        static_assert(Config::NUM_ROW_BLOCKS == 1);
        RowOrigins origins(launch, params);
        consumer_role<Config, GroupedTile>(
            smem.mainloop, warpgroup, params.comm.trace,
            [&](GroupedTile* work) {
              origins.fetch();
              const bool has_work = moe::next_work<Config>(cursor, feed, num_tiles++, work);
              if (has_work) origins.expect(moe::warp_row(*work, warpgroup), work->row_end);
              return has_work;
            },
            [&](const GroupedTile& work, int block, float(&accumulators)[Config::BLOCK_N / 2]) {
              finish_rows<Config>(params, smem, work, block, accumulators, origins.origin());
            });
      });
}

template <class Config>
__global__ void __launch_bounds__(Config::NUM_THREADS, 1)
    moe_dispatch_gemm_kernel(const __grid_constant__ CudaParams params) {
  extern __shared__ __align__(1024) uint8_t smem_bytes[];
  Storage<Config>& smem = *reinterpret_cast<Storage<Config>*>(smem_bytes);
  const RankLaunch launch(params.comm);
  launch.begin_cta();
  moe::route(launch, params.comm, params.routing, smem.counting(), smem.decision,
             [&](int, int64_t, int64_t) { return static_cast<size_t>(params.layout.bytes()); });
  if (smem.decision.has_counts) {
    const bool goes_on = smem.decision.verdict.kind == moe::Verdict::go;
    if (goes_on) fill_tables<Config::NUM_THREADS>(launch, params, smem.tables);
    if (static_cast<int>(blockIdx.x) < params.routing.num_counting_ctas)
      place_items<Config::NUM_THREADS>(launch, params, smem.tables, smem.counting(), goes_on);
    if (blockIdx.x == gridDim.x - 1 && params.routing.writes_record)
      begin_record<Config::NUM_THREADS>(params, smem.tables, smem.decision.verdict);
  }
  if (moe::finish_routing(launch, params.comm, params.routing, smem.decision)) {
    const bool pushes = static_cast<int>(blockIdx.x) >= params.num_compute_ctas;
    if (pushes) {
      run_push_cta<Config>(params, smem);
    } else {
      push_first_turn<Config>(params, smem);
    }
    if (!pushes || moe::DEALS_TILES<Config>) run_product_cta<Config>(launch, params, smem);
  }
  launch.end_cta();
}

template <GemmTile TILE, class Element, bool B_TRANSPOSED>
constexpr moe::ExpertKernel<CudaParams> cuda_kernel_entry() {
  using Config = GemmConfig<TILE.block_m, TILE.block_n, TILE.ping_pong, Element, false, B_TRANSPOSED>;
  static_assert(sizeof(Storage<Config>) <= 227 * 1024);
  return {moe_dispatch_gemm_kernel<Config>, Config::NUM_THREADS, sizeof(Storage<Config>)};
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

}  // namespace mk::moe_dispatch_gemm
