// SPDX-License-Identifier: MIT
// AllGather+GEMM as one persistent kernel: the copy warps of all CTAs push this rank's rows into the peers'
// receive areas, chunk by chunk, while the tensor cores take the rows at hand first and the others as their
// flags rise.
#pragma once

#include "kernels/device/copy_rows.cuh"
#include "kernels/device/rank_gemm.cuh"
#include "kernels/ops/allgather_gemm/cuda_params.h"

namespace mk::allgather_gemm {

using CudaTable = RankGemmTable<CudaParams>;
const CudaTable& cuda_kernels_bf16();
const CudaTable& cuda_kernels_fp16();

// Whose rows a tile holds. Merged tiles hold several ranks' (source -1).
struct SourceTile {
  int source;
  int begin;  // rows of the gathered matrix
  int end;
  int first_row;  // of the source's
};

__device__ __forceinline__ int source_at(const CudaParams& params, int position) {
  const int source = params.comm.rank + position;
  return source < params.comm.nranks ? source : source - params.comm.nranks;
}

// Rows of a source; without the divisions of the schedule's own, which the walk over tiles has no time for.
__device__ __forceinline__ int rows_of(const CudaParams& params, int source) {
  return max(0, min(params.max_rows, params.m - source * params.max_rows));
}

__device__ __forceinline__ int rows_at(const CudaParams& params, int position) {
  return params.merged ? params.m : rows_of(params, source_at(params, position));
}

template <int BLOCK_M>
__device__ __forceinline__ SourceTile source_tile(const CudaParams& params, const TileWork& work) {
  const RankTile tile = RankTileCursor::place(work, params.tile_rows);
  const int first_row = tile.index * BLOCK_M;
  if (params.merged) return {-1, first_row, params.m, first_row};
  const int source = source_at(params, tile.position);
  const int begin = source * params.max_rows;
  return {source, begin + first_row, begin + rows_of(params, source), first_row};
}

// Returns when a panel of columns of a tile's rows has arrived.
template <int BLOCK_M>
__device__ __forceinline__ void wait_panel(const RankLaunch& launch, const CudaParams& params,
                                           const SourceTile& tile, int panel) {
  const Schedule& schedule = params.schedule;
  const int last_row = min(tile.begin + BLOCK_M, tile.end) - 1;
  const int first_source = tile.source >= 0 ? tile.source : tile.begin / params.max_rows;
  const int last_source = tile.source >= 0 ? tile.source : last_row / params.max_rows;
  const int chunk_rows = static_cast<int>(schedule.chunk_rows);
  for (int source = first_source; source <= last_source; ++source) {
    const int begin = source * params.max_rows;
    const int first = max(tile.begin - begin, 0);
    const int last = min(last_row - begin, rows_of(params, source) - 1);
    for (int chunk = first / chunk_rows; chunk <= last / chunk_rows; ++chunk) {
      const int flag = schedule.flag(source, chunk) * params.num_panels + panel;
      launch.wait_flag(flag, DeviceRole::compute, DeviceObject::chunk, source, chunk);
    }
  }
  // TMA is another proxy than the loads that saw the flags.
  ptx::fence_proxy_async_global();
}

template <class Config>
__device__ __forceinline__ void produce(const RankLaunch& launch, MainloopStorage<Config>& smem,
                                        const CudaParams& params) {
  const ClusterPosition cluster = {0, 1};
  const CUtensorMap* map_gathered = &params.map_gathered[launch.bank()];
  ptx::prefetch_tensormap(&params.load.map_a);
  ptx::prefetch_tensormap(&params.load.map_b);
  ptx::prefetch_tensormap(map_gathered);
  RankTileCursor tiles(params.tiles, blockIdx.x, params.tile_rows);
  StageCursor<Config::NUM_STAGES> stages;
  TileWork work;
  while (tiles.next(&work, Config::BLOCK_M, [&](int position) { return rows_at(params, position); })) {
    const SourceTile tile = source_tile<Config::BLOCK_M>(params, work);
    const bool is_own = tile.source == params.comm.rank;
    int next_wait = is_own ? work.k_end : 0;  // the first k-step of a panel not waited for
    const Tracer tracer(params.comm.trace, TRACE_LOAD);
    tracer.begin(TraceKind::load, trace_tile(work));
    load_tile<Config>(smem, stages, params.load, is_own ? &params.load.map_a : map_gathered,
                      is_own ? tile.first_row : tile.begin, work, cluster, [&](int k_step) {
                        if (k_step < next_wait) return;
                        wait_panel<Config::BLOCK_M>(launch, params, tile, k_step / params.panel_steps);
                        next_wait = (k_step / params.panel_steps + 1) * params.panel_steps;
                      });
    tracer.end();
  }
}

// A push warp's unit of work: 16 rows of a chunk by up to 1,024 columns of a panel, in pieces of its buffer's
// size: one or two boxes of map_push.
constexpr int PIECE_ROWS = 16;
constexpr int BOX_COLUMNS = PUSH_BUFFER_BYTES / 2 / PIECE_ROWS;
constexpr int UNIT_COLUMNS = 4 * BOX_COLUMNS;

// Pushes this rank's rows, as one of `num_warps`. Units in the order in which they are wanted: a panel, to the
// peer that is to compute it first (the one before this rank), chunk by chunk.
template <int BOXES>
__device__ __forceinline__ void push_rows(const RankLaunch& launch, const CudaParams& params, BulkPush& push,
                                          int warp, int num_warps) {
  constexpr int PIECE_COLUMNS = BOXES * BOX_COLUMNS;
  const Schedule& schedule = params.schedule;
  const int rank = params.comm.rank;
  const int lane = threadIdx.x % 32;
  const int piece_row = lane % PIECE_ROWS;
  const int box = lane / PIECE_ROWS;
  const int rows = rows_of(params, rank);
  const int chunk_rows = static_cast<int>(schedule.chunk_rows);
  const int num_columns = static_cast<int>(schedule.k);
  const int panel_columns = params.panel_steps * 64;
  const int units_across = (min(panel_columns, num_columns) + UNIT_COLUMNS - 1) / UNIT_COLUMNS;
  const int units_per_chunk = chunk_rows / PIECE_ROWS * units_across;
  const int units_per_peer = (rows + chunk_rows - 1) / chunk_rows * units_per_chunk;
  const int first_position = params.merged ? 0 : 1;
  const int num_positions = params.comm.nranks - first_position;
  const int64_t num_units = int64_t{units_per_peer} * num_positions * params.num_panels;
  const auto pitch = static_cast<int64_t>(schedule.row_pitch());
#pragma unroll 1
  for (int64_t idx = warp; idx < num_units; idx += num_warps) {
    const int turn = static_cast<int>(idx / units_per_peer);
    const int unit = static_cast<int>(idx - int64_t{turn} * units_per_peer);
    const int panel = turn / num_positions;
    const int position = turn - panel * num_positions + first_position;
    const int chunk = unit / units_per_chunk;
    const int unit_in_chunk = unit - chunk * units_per_chunk;
    const int row = chunk * chunk_rows + unit_in_chunk / units_across * PIECE_ROWS;
    const int panel_end = min((panel + 1) * panel_columns, num_columns);
    const int first_column = panel * panel_columns + unit_in_chunk % units_across * UNIT_COLUMNS;
    if (row >= rows || first_column >= panel_end) continue;
    const int peer = rank >= position ? rank - position : rank - position + params.comm.nranks;
    std::byte* to = launch.area(peer, (int64_t{rank} * params.max_rows + row + piece_row) * pitch);
    const int end = min(first_column + UNIT_COLUMNS, panel_end);
    const Tracer tracer(params.comm.trace, trace_track());
    tracer.begin(TraceKind::copy, chunk, peer);
#pragma unroll 1
    for (int column = first_column; column < end; column += PIECE_COLUMNS) {
      const int num_boxes = min(BOXES, (end - column + BOX_COLUMNS - 1) / BOX_COLUMNS);
      push.load(num_boxes * PUSH_BUFFER_BYTES, [&] {
        if (lane < num_boxes) {
          ptx::cp_async_bulk_tensor_2d_shared_global(push.buffer() + lane * PUSH_BUFFER_BYTES, &params.map_push,
                                                     push.loaded(), column + lane * BOX_COLUMNS, row);
        }
      });
      // Rows are padded to 16 bytes where they land.
      const int own_column = column + box * BOX_COLUMNS;
      const int row_bytes = (min(end - own_column, BOX_COLUMNS) * 2 + 15) / 16 * 16;
      if (box < num_boxes && row + piece_row < rows) {
        ptx::cp_async_bulk_global_shared(to + own_column * 2,
                                         push.buffer() + box * PUSH_BUFFER_BYTES + piece_row * BOX_COLUMNS * 2,
                                         row_bytes);
      }
      ptx::cp_async_bulk_commit_group();
    }
    push.complete();
    tracer.end();
    const int rows_of_chunk = min(chunk_rows, rows - chunk * chunk_rows);
    const int units_across_panel = (panel_end - panel * panel_columns + UNIT_COLUMNS - 1) / UNIT_COLUMNS;
    const auto expected =
        static_cast<uint32_t>((rows_of_chunk + PIECE_ROWS - 1) / PIECE_ROWS * units_across_panel);
    const int count = (position * schedule.max_chunks + chunk) * params.num_panels + panel;
    if (arrive(&params.comm.state->counts[count], expected) && lane == 0) {
      launch.raise_flag(peer, schedule.flag(rank, chunk) * params.num_panels + panel);
    }
  }
}

// A CTA that only pushes: all its warps.
template <class Config>
__device__ __forceinline__ void run_push_cta(const RankLaunch& launch, const CudaParams& params,
                                             uint8_t* smem_bytes) {
  constexpr int NUM_WARPS = Config::NUM_THREADS / 32;
  using Storage = PushCtaStorage<NUM_WARPS>;
  static_assert(sizeof(Storage) <= sizeof(RankGemmStorage<Config>));
  Storage& storage = *reinterpret_cast<Storage*>(smem_bytes);
  if (threadIdx.x == 0) {
    for (uint64_t& loaded : storage.loaded) ptx::mbarrier_init(&loaded, 1);
    ptx::fence_mbarrier_init_release_cluster();
  }
  __syncthreads();
  const int warp = threadIdx.x / 32;
  const int num_ctas = gridDim.x - params.tiles.num_workers;
  BulkPush push(storage, warp);
  push_rows<Storage::BUFFERS>(launch, params, push, warp * num_ctas + blockIdx.x - params.tiles.num_workers,
                              NUM_WARPS * num_ctas);
}

// Brings all rows to the caller's gathered A.
__device__ __forceinline__ void gather_rows(const RankLaunch& launch, const CudaParams& params,
                                            const CopyWarp& warp) {
  const Schedule& schedule = params.schedule;
  const int pieces_per_chunk = static_cast<int>(ceil_div(schedule.chunk_rows, params.piece_rows));
  const int64_t pieces_per_source = int64_t{schedule.max_chunks} * pieces_per_chunk;
#pragma unroll 1
  for (int64_t idx = warp.index(); idx < pieces_per_source * params.comm.nranks;
       idx += NUM_COPY_WARPS * warp.num_ctas) {
    const int position = static_cast<int>(idx / pieces_per_source);
    const int source = source_at(params, position);
    const int64_t piece_idx = idx - position * pieces_per_source;
    const int chunk = static_cast<int>(piece_idx / pieces_per_chunk);
    const int64_t first_row = (piece_idx - int64_t{chunk} * pieces_per_chunk) * params.piece_rows;
    const int64_t row = chunk * schedule.chunk_rows + first_row;  // of the source's
    if (chunk >= schedule.chunks(source) || first_row >= schedule.chunk_count(source, chunk)) continue;
    const int64_t pitch = static_cast<int64_t>(schedule.row_pitch());
    const std::byte* from = params.a + row * params.a_pitch;
    if (source != params.comm.rank) {
      for (int panel = 0; panel < params.num_panels; ++panel) {
        launch.wait_flag(schedule.flag(source, chunk) * params.num_panels + panel, DeviceRole::gather,
                         DeviceObject::chunk, source, chunk);
      }
      from = launch.area(params.comm.rank, schedule.area_offset(source, chunk) + first_row * pitch);
    }
    const Tracer tracer(params.comm.trace, TRACE_COPY + warp.warp);
    tracer.begin(TraceKind::copy, chunk, source);
    copy_rows({params.a_gathered + (schedule.chunk_begin(source, chunk) + first_row) * params.a_gathered_pitch,
               from, params.a_gathered_pitch, source == params.comm.rank ? params.a_pitch : pitch,
               min_of(params.piece_rows, schedule.chunk_count(source, chunk) - first_row),
               static_cast<int64_t>(schedule.row_bytes())});
    tracer.end();
  }
}

template <class Config>
__global__ void __launch_bounds__(Config::NUM_THREADS, 1)
    allgather_gemm_kernel(const __grid_constant__ CudaParams params) {
  extern __shared__ __align__(1024) uint8_t smem_bytes[];
  RankGemmStorage<Config>& smem = *reinterpret_cast<RankGemmStorage<Config>*>(smem_bytes);
  const RankLaunch launch(params.comm);
  const ClusterPosition cluster = {0, 1};
  launch.begin_cta();
  if (static_cast<int>(blockIdx.x) >= params.tiles.num_workers) {
    if (params.schedule.k > 0) run_push_cta<Config>(launch, params, smem_bytes);
    launch.end_cta();
    return;
  }
  if (threadIdx.x == 0) storage_init(smem);
  __syncthreads();
  run_roles<Config>(
      params.tiles.num_workers, [&] { produce<Config>(launch, smem.mainloop, params); },
      [&](const CopyWarp& warp) {
        if (warp.greets()) launch.greet();
        if (warp.pushes() && params.schedule.k > 0 && gridDim.x == params.tiles.num_workers) {
          BulkPush push(smem.push, warp.warp);
          push_rows<1>(launch, params, push, warp.index(), NUM_PUSH_WARPS * gridDim.x);
        }
        if (params.a_gathered != nullptr) gather_rows(launch, params, warp);
      },
      [&](int warpgroup) {
        RankTileCursor tiles(params.tiles, blockIdx.x, params.tile_rows);
        consumer_role<Config>(
            smem.mainloop, cluster, warpgroup, params.comm.trace,
            [&](TileWork* work) {
              return tiles.next(work, Config::BLOCK_M, [&](int position) { return rows_at(params, position); });
            },
            [&](const TileWork& work, int block, float(&accumulators)[Config::BLOCK_N / 2]) {
              const SourceTile tile = source_tile<Config::BLOCK_M>(params, work);
              const int warp = threadIdx.x / 32;
              store_tile_rows(accumulators, params.epilogue, smem.epilogue[warp],
                              tile.begin + block * 64 + warp % 4 * 16, tile.end, work.n_tile * Config::BLOCK_N);
            });
      });
  launch.end_cta();
}

template <GemmTile TILE, class Element, bool B_TRANSPOSED>
constexpr RankGemmKernel<CudaParams> cuda_kernel_entry() {
  using Config = GemmConfig<TILE.block_m, TILE.block_n, TILE.ping_pong, Element, false, B_TRANSPOSED>;
  static_assert(sizeof(RankGemmStorage<Config>) <= 227 * 1024);
  return {allgather_gemm_kernel<Config>, Config::NUM_THREADS, sizeof(RankGemmStorage<Config>),
          Config::STAGE_BYTES};
}

template <class Element>
const CudaTable& cuda_kernel_table() {
  static const CudaTable table = []<size_t... TILES>(std::index_sequence<TILES...>) {
    return CudaTable{{{cuda_kernel_entry<RANK_GEMM_TILES[TILES], Element, false>(),
                       cuda_kernel_entry<RANK_GEMM_TILES[TILES], Element, true>()}...}};
  }
  (std::make_index_sequence<NUM_RANK_GEMM_TILES>());
  return table;
}

}  // namespace mk::allgather_gemm
