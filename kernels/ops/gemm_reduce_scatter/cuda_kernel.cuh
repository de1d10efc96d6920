// SPDX-License-Identifier: MIT
// GEMM+ReduceScatter and GEMM+AllReduce as one persistent kernel. The epilogue leaves partial tiles in a small
// ring in device memory (the L2), and the push warps send them to the slots of their rows' owner while the next
// tile is computed; each rank computes its own rows last, when the others' partials of them have mostly
// arrived, and sums in the epilogue.
#pragma once

#include "kernels/device/copy_rows.cuh"
#include "kernels/device/partial_sums.cuh"
#include "kernels/device/rank_gemm.cuh"
#include "kernels/ops/gemm_reduce_scatter/cuda_params.h"

namespace mk::gemm_reduce_scatter {

using CudaTable = RankGemmTable<CudaParams>;
const CudaTable& cuda_kernels_bf16();
const CudaTable& cuda_kernels_fp16();

// Kernels between nodes have another order of owners (cuda_network_kernel.cuh).
// The next ranks first, this one last. One-shot: every rank owns all rows.
__device__ __forceinline__ int owner_at(const CudaParams& params, int position) {
  if (params.reduction == Reduction::one_shot) return params.comm.rank;
  const int owner = params.comm.rank + position + 1;
  return owner < params.comm.nranks ? owner : owner - params.comm.nranks;
}

__device__ __forceinline__ RankTileOrder order_of(const CudaParams& params) { return {params.tile_rows, 0}; }

// One-shot: max_rows is m, and every rank owns what begins at 0.
__device__ __forceinline__ int first_row_of(const CudaParams& params, int owner) {
  return params.reduction == Reduction::one_shot ? 0 : min(params.m, owner * params.max_rows);
}

__device__ __forceinline__ int rows_of(const CudaParams& params, int owner) {
  return min(params.max_rows, params.m - first_row_of(params, owner));
}

template <class Config, class Params>
__device__ __forceinline__ void produce(MainloopStorage<Config>& smem, const Params& params) {
  ptx::prefetch_tensormap(&params.load.map_a);
  ptx::prefetch_tensormap(&params.load.map_b);
  RankTileCursor tiles(params.tiles, blockIdx.x, order_of(params));
  StageCursor<Config::NUM_STAGES> stages;
  TileWork work;
  while (tiles.next(&work, Config::BLOCK_M,
                    [&](int position) { return rows_of(params, owner_at(params, position)); })) {
    const RankTile tile = order_of(params).place(work);
    const int row = first_row_of(params, owner_at(params, tile.position)) + tile.index * Config::BLOCK_M;
    const Tracer tracer(params.comm.trace, TRACE_LOAD);
    tracer.begin(TraceKind::load, trace_tile(work));
    load_tile<Config>(smem, stages, params.load, &params.load.map_a, row, work, ClusterPosition{0, 1},
                      AIsReady());
    tracer.end();
  }
}

// A tile's number among its owner's, by which flags and slots are counted.
__device__ __forceinline__ int tile_index(const CudaParams& params, const TileWork& work,
                                          const RankTile& tile) {
  return tile.index * params.tiles.num_n_tiles + work.n_tile;
}

__device__ __forceinline__ int element_bytes_of(GemmType type) { return type == GemmType::fp32 ? 4 : 2; }

// Where source `source`'s partial of an owner's tile lies in the owner's memory.
template <class Config>
__device__ __forceinline__ int64_t slot_offset(const CudaParams& params, int source, int tile) {
  constexpr int SLABS = Config::BLOCK_M / 16;
  return source * params.slot_bytes +
         int64_t{tile} * (SLABS * slab_bytes<Config::BLOCK_N>(element_bytes_of(params.comm_type)));
}

template <class Config>
__device__ __forceinline__ std::byte* staged_tile(const CudaParams& params, int slot) {
  return params.comm.staging + blockIdx.x * STAGING_BYTES + slot * (STAGING_BYTES / NUM_STAGED_TILES);
}

// The consumers' side of the ring of finished tiles.
template <class Config>
__device__ __forceinline__ void wait_staging(RankGemmStorage<Config>& smem, int ordinal) {
  mbarrier_wait(&smem.staged_empty[ordinal % NUM_STAGED_TILES], ordinal / NUM_STAGED_TILES % 2 ^ 1);
}
template <class Config>
__device__ __forceinline__ void pass_to_push_warps(RankGemmStorage<Config>& smem, int ordinal) {
  // The push warps read by the bulk copy engine, another proxy than the one written through.
  ptx::fence_proxy_async_global();
  __syncwarp();
  if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(&smem.staged_full[ordinal % NUM_STAGED_TILES]);
}

__device__ __forceinline__ void wait_partials(const RankLaunch& launch, const CudaParams& params, int flag,
                                              int flags_per_source, int tile) {
  for (int source = threadIdx.x % 32; source < params.comm.nranks; source += 32) {
    if (source == params.comm.rank) continue;
    launch.wait_flag(params.first_flag + source * flags_per_source + flag, DeviceRole::reduce,
                     DeviceObject::partial, source, tile);
  }
  __syncwarp();
}

// One-shot: to everyone straight from the registers, a flag a slab, since a launch is too short for detours.
template <class Config>
__device__ __forceinline__ void exchange_slab(const RankLaunch& launch, const CudaParams& params, int tile,
                                              int slab, const float (&accumulators)[Config::BLOCK_N / 2]) {
  constexpr int SLABS = Config::BLOCK_M / 16;
  const int rank = params.comm.rank;
  const int nranks = params.comm.nranks;
  const int64_t offset = slot_offset<Config>(params, rank, tile) +
                         int64_t{slab} * slab_bytes<Config::BLOCK_N>(element_bytes_of(params.comm_type));
#pragma unroll 1
  for (int step = 1; step <= nranks; ++step) {
    const int peer = rank + step < nranks ? rank + step : rank + step - nranks;
    store_slab(accumulators, params.comm_type, launch.area(peer, offset));
  }
  __syncwarp();
  const int flag = tile * SLABS + slab;
  const int flags_per_source = params.tiles.num_tiles() * SLABS;
  for (int peer = threadIdx.x % 32; peer < nranks; peer += 32) {
    if (peer != rank) launch.raise_flag(peer, params.first_flag + rank * flags_per_source + flag);
  }
  wait_partials(launch, params, flag, flags_per_source, tile);
}

// 64 rows of a finished product: another owner's go there, this rank's own are summed.
template <class Config>
__device__ __forceinline__ void finish_block(const RankLaunch& launch, const CudaParams& params,
                                             RankGemmStorage<Config>& smem, const TileWork& work, int block,
                                             const float (&accumulators)[Config::BLOCK_N / 2]) {
  const int rank = params.comm.rank;
  const RankTile place = order_of(params).place(work);
  const int owner = owner_at(params, place.position);
  const int tile = tile_index(params, work, place);
  const int slab = block * 4 + threadIdx.x / 32 % 4;
  const int row = place.index * Config::BLOCK_M + slab * 16;
  const int row_end = rows_of(params, owner);
  const int column = work.n_tile * Config::BLOCK_N;
  const bool has_rows = row < row_end;
  const int64_t slab_offset = int64_t{slab} * slab_bytes<Config::BLOCK_N>(element_bytes_of(params.comm_type));
  if (owner != rank) {
    wait_staging(smem, work.ordinal);
    if (has_rows) {
      store_slab(accumulators, params.comm_type,
                 staged_tile<Config>(params, work.ordinal % NUM_STAGED_TILES) + slab_offset);
    }
    pass_to_push_warps(smem, work.ordinal);
    return;
  }
  EpilogueParams output = params.output;
  int64_t first_row = 0;
  if (params.reduction == Reduction::two_shot) {
    // Into the gathered result in the receive area, whence it goes to the peers, and to C.
    output.c = launch.area(rank, params.gather_begin);
    output.ldc = params.gather_pitch / element_bytes_of(output.out_type);
    output.accumulate = false;
    output.rows_aligned = true;
    first_row = first_row_of(params, rank);
    wait_staging(smem, work.ordinal);
  }
  if (has_rows) {
    if (params.reduction == Reduction::one_shot) {
      exchange_slab<Config>(launch, params, tile, slab, accumulators);
    } else {
      store_slab(accumulators, params.comm_type,
                 launch.area(rank, slot_offset<Config>(params, rank, tile) + slab_offset));
      wait_partials(launch, params, tile, params.tiles_per_owner, tile);
    }
    const Tracer tracer(params.comm.trace, TRACE_COMPUTE + threadIdx.x / 128);
    const uint64_t start = tracer.now();
    finish_slab<Config::BLOCK_N>({launch.area(rank, slot_offset<Config>(params, 0, tile) + slab_offset),
                                  params.slot_bytes, params.comm.nranks},
                                 params.comm_type, output, params.reduction == Reduction::one_shot,
                                 smem.epilogue[threadIdx.x / 32], first_row + row, first_row + row_end, column);
    tracer.record(TraceKind::reduce, start, trace_tile(work));
  }
  if (params.reduction == Reduction::two_shot) pass_to_push_warps(smem, work.ordinal);
}

// Where links are idle for most of the time, a piece begins when the one before has arrived: a link that is
// never full lets the product's own traffic through.
template <class Push>
__device__ __forceinline__ void keep_pace(const CudaParams& params, Push& push) {
  if (params.is_paced) push.template complete<0>();
}

// A piece of a partial tile.
struct PartialPiece {
  int begin;  // bytes
};

// A partial tile from the staging memory to `to`, its place at its owner.
template <class Config, class Push>
__device__ __forceinline__ void push_partial(const CudaParams& params, Push& push, int warp,
                                             const TileWork& work, std::byte* to, int num_rows) {
  constexpr int PACED_PIECE_BYTES = 1024;
  const int piece_bytes = params.is_paced ? PACED_PIECE_BYTES : Push::PIECE_BYTES;
  const int num_bytes = (num_rows + 15) / 16 * slab_bytes<Config::BLOCK_N>(element_bytes_of(params.comm_type));
  const std::byte* from = staged_tile<Config>(params, work.ordinal % NUM_STAGED_TILES);
  int next_begin = warp * piece_bytes;
  push.template move<PartialPiece>(
      [&](PartialPiece* piece) {
        piece->begin = next_begin;
        next_begin += NUM_PUSH_WARPS * piece_bytes;
        return piece->begin < num_bytes;
      },
      [&](const PartialPiece& piece, uint8_t* buffer, uint64_t* loaded) {
        if (threadIdx.x % 32 != 0) return;
        const int bytes = min(piece_bytes, num_bytes - piece.begin);
        ptx::mbarrier_arrive_expect_tx(loaded, bytes);
        ptx::cp_async_bulk_shared_global(buffer, from + piece.begin, bytes, loaded);
      },
      [&](const PartialPiece& piece, const uint8_t* buffer) {
        keep_pace(params, push);
        if (threadIdx.x % 32 != 0) return;
        ptx::cp_async_bulk_global_shared(to + piece.begin, buffer, min(piece_bytes, num_bytes - piece.begin));
        ptx::cp_async_bulk_commit_group();
      });
}

// A piece of a finished tile: its first row.
struct FinishedPiece {
  int row;
};

// Rows of a finished tile, from where this rank has gathered them to the same place at every peer, or to C of
// all ranks, this one included.
template <class Config, class Push>
__device__ __forceinline__ void push_finished(const RankLaunch& launch, const CudaParams& params, Push& push,
                                              int warp, int first_row, int num_rows, int column) {
  const int rank = params.comm.rank;
  const bool writes_outputs = launch.writes_outputs();
  const int lane = threadIdx.x % 32;
  const int element_bytes = element_bytes_of(params.output.out_type);
  const int rows_per_piece = 16 / element_bytes;
  static_assert(Config::BLOCK_N * 16 <= Push::PIECE_BYTES);
  const int buffer_pitch = Config::BLOCK_N * element_bytes;
  const int row_bytes = (min(params.output.n - column, Config::BLOCK_N) * element_bytes + 15) / 16 * 16;
  const int64_t begin = params.gather_begin + first_row * params.gather_pitch + column * int64_t{element_bytes};
  int next_row = warp * rows_per_piece;
  push.template move<FinishedPiece>(
      [&](FinishedPiece* piece) {
        piece->row = next_row;
        next_row += NUM_PUSH_WARPS * rows_per_piece;
        return piece->row < num_rows;
      },
      [&](const FinishedPiece& piece, uint8_t* buffer, uint64_t* loaded) {
        const int rows = min(rows_per_piece, num_rows - piece.row);
        if (lane == 0) ptx::mbarrier_arrive_expect_tx(loaded, rows * row_bytes);
        __syncwarp();
        if (lane >= rows) return;
        const int64_t offset = begin + (piece.row + lane) * params.gather_pitch;
        ptx::cp_async_bulk_shared_global(buffer + lane * buffer_pitch, launch.area(rank, offset), row_bytes,
                                         loaded);
      },
      [&](const FinishedPiece& piece, const uint8_t* buffer) {
        keep_pace(params, push);
        if (lane < min(rows_per_piece, num_rows - piece.row)) {
          const int64_t row = piece.row + lane;
          const int64_t offset = writes_outputs
                                     ? ((first_row + row) * params.output.ldc + column) * element_bytes
                                     : begin + row * params.gather_pitch;
#pragma unroll 1
          for (int step = writes_outputs ? 0 : 1; step < params.comm.nranks; ++step) {
            const int peer = rank >= step ? rank - step : rank - step + params.comm.nranks;
            std::byte* const to =
                writes_outputs ? params.comm.outputs[peer] + offset : launch.area(peer, offset);
            ptx::cp_async_bulk_global_shared(to, buffer + lane * buffer_pitch, row_bytes);
          }
        }
        ptx::cp_async_bulk_commit_group();
      });
}

// Both push warps of a CTA: what the consumers finish, as long as peers want it.
template <class Config>
__device__ __forceinline__ void push_tiles(const RankLaunch& launch, const CudaParams& params,
                                           RankGemmStorage<Config>& smem, int warp) {
  const int rank = params.comm.rank;
  const int lane = threadIdx.x % 32;
  BulkPush push(smem.push, warp);
  RankTileCursor tiles(params.tiles, blockIdx.x, order_of(params));
  TileWork work;
  while (tiles.next(&work, Config::BLOCK_M,
                    [&](int position) { return rows_of(params, owner_at(params, position)); })) {
    const RankTile place = order_of(params).place(work);
    const int owner = owner_at(params, place.position);
    if (owner == rank && params.reduction != Reduction::two_shot) return;  // own tiles are the last
    const int tile = tile_index(params, work, place);
    const int num_rows = min(Config::BLOCK_M, rows_of(params, owner) - place.index * Config::BLOCK_M);
    const int slot = work.ordinal % NUM_STAGED_TILES;
    mbarrier_wait(&smem.staged_full[slot], work.ordinal / NUM_STAGED_TILES % 2);
    const Tracer tracer(params.comm.trace, TRACE_COPY + warp);
    tracer.begin(TraceKind::copy, trace_tile(work), owner);
    if (owner != rank) {
      push_partial<Config>(params, push, warp, work,
                           launch.area(owner, slot_offset<Config>(params, rank, tile)), num_rows);
    } else {
      push_finished<Config>(launch, params, push, warp,
                            first_row_of(params, rank) + place.index * Config::BLOCK_M, num_rows,
                            work.n_tile * Config::BLOCK_N);
    }
    if (lane == 0) ptx::mbarrier_arrive(&smem.staged_empty[slot]);
    push.template complete<0>();
    tracer.end();
    ptx::barrier_sync(PUSH_BARRIER, NUM_PUSH_WARPS * 32);
    if (warp != 0) continue;
    if (owner != rank) {
      if (lane == 0) launch.raise_flag(owner, params.first_flag + rank * params.tiles_per_owner + tile);
    } else {
      for (int peer = lane; peer < params.comm.nranks; peer += 32) {
        launch.raise_flag(peer, params.first_gather_flag + rank * params.tiles_per_owner + tile);
      }
    }
  }
}

// Adds a row of finished 16-bit or fp32 elements to C.
template <class Out>
__device__ __forceinline__ void add_row(Out* c, const Out* row, int n) {
  for (int column = threadIdx.x % 32; column < n; column += 32) {
    c[column] = static_cast<Out>(static_cast<float>(row[column]) + static_cast<float>(c[column]));
  }
}

// 16 rows of a finished tile, from the receive area to C.
__device__ __forceinline__ void bring_rows(const EpilogueParams& output, std::byte* to, const std::byte* from,
                                           int64_t from_pitch, int rows, int num_columns) {
  const int element_bytes = element_bytes_of(output.out_type);
  const int64_t to_pitch = output.ldc * element_bytes;
  if (!output.accumulate && output.rows_aligned) {
    copy_rows({to, from, to_pitch, from_pitch, rows, int64_t{num_columns} * element_bytes});
    return;
  }
#pragma unroll 1
  for (int i = 0; i < rows; ++i, from += from_pitch, to += to_pitch) {
    if (!output.accumulate) {
      for (int at = threadIdx.x % 32 * 2; at < num_columns * element_bytes; at += 64) {
        *reinterpret_cast<uint16_t*>(to + at) = *reinterpret_cast<const uint16_t*>(from + at);
      }
    } else if (output.out_type == GemmType::bf16) {
      add_row(reinterpret_cast<__nv_bfloat16*>(to), reinterpret_cast<const __nv_bfloat16*>(from), num_columns);
    } else if (output.out_type == GemmType::fp16) {
      add_row(reinterpret_cast<__half*>(to), reinterpret_cast<const __half*>(from), num_columns);
    } else {
      add_row(reinterpret_cast<float*>(to), reinterpret_cast<const float*>(from), num_columns);
    }
  }
}

// Two-shot: brings all owners' finished rows from the receive area to C, or waits until owners have, in the
// order in which these, all at the same time, finish them. Pieces are handed out one by one, because the push
// warps come late.
template <class Config>
__device__ __forceinline__ void gather_finished(const RankLaunch& launch, const CudaParams& params) {
  constexpr int SLABS = Config::BLOCK_M / 16;
  const int num_n_tiles = params.tiles.num_n_tiles;
  const int tiles_per_group = params.tiles.group_m * num_n_tiles;
  const int num_pieces = params.tiles_per_owner * params.comm.nranks * SLABS;
  const int element_bytes = element_bytes_of(params.output.out_type);
  launch.wait_for_outputs();
  while (true) {
    int piece = 0;
    if (threadIdx.x % 32 == 0) piece = atomicAdd(&params.comm.state->gather_ticket, 1u);
    piece = __shfl_sync(~0u, piece, 0);
    if (piece >= num_pieces) return;
    const int slab = piece % SLABS;
    const int owner = owner_at(params, piece / SLABS % params.comm.nranks);
    const int idx = piece / SLABS / params.comm.nranks;
    const int group = idx / tiles_per_group;
    const int idx_in_group = idx - group * tiles_per_group;
    const int group_rows = min(params.tiles.group_m, params.tile_rows - group * params.tiles.group_m);
    const int n_tile = idx_in_group / group_rows;
    const int m_tile = group * params.tiles.group_m + idx_in_group - n_tile * group_rows;
    const int row = m_tile * Config::BLOCK_M + slab * 16;
    const int rows = min(16, rows_of(params, owner) - row);
    if (rows <= 0) continue;
    const int tile = m_tile * num_n_tiles + n_tile;
    launch.wait_flag(params.first_gather_flag + owner * params.tiles_per_owner + tile, DeviceRole::gather,
                     DeviceObject::reduced_tile, owner, tile);
    __syncwarp();
    if (launch.has_open_outputs()) continue;  // asked anew: a register for it would cost the consumers theirs
    const int64_t first = first_row_of(params, owner) + row;
    const int column = n_tile * Config::BLOCK_N;
    const Tracer tracer(params.comm.trace, trace_track());
    tracer.begin(TraceKind::copy, tile, owner);
    bring_rows(params.output,
               static_cast<std::byte*>(params.output.c) + (first * params.output.ldc + column) * element_bytes,
               launch.area(params.comm.rank,
                           params.gather_begin + first * params.gather_pitch + int64_t{column} * element_bytes),
               params.gather_pitch, rows, min(params.output.n - column, Config::BLOCK_N));
    tracer.end();
  }
}

template <class Config>
__global__ void __launch_bounds__(Config::NUM_THREADS, 1)
    gemm_reduction_kernel(const __grid_constant__ CudaParams params) {
  extern __shared__ __align__(1024) uint8_t smem_bytes[];
  RankGemmStorage<Config>& smem = *reinterpret_cast<RankGemmStorage<Config>*>(smem_bytes);
  const RankLaunch launch(params.comm);
  const ClusterPosition cluster = {0, 1};
  if (threadIdx.x == 0) storage_init(smem);
  launch.begin_cta();
  __syncthreads();
  run_roles<Config>(
      params.tiles.num_workers, [&] { produce<Config>(smem.mainloop, params); },
      [&](const CopyWarp& warp) {
        if (warp.greets()) launch.greet();
        if (warp.pushes() && params.reduction != Reduction::one_shot)
          push_tiles<Config>(launch, params, smem, warp.warp);
        if (params.reduction == Reduction::two_shot) gather_finished<Config>(launch, params);
      },
      [&](int warpgroup) {
        RankTileCursor tiles(params.tiles, blockIdx.x, order_of(params));
        consumer_role<Config>(
            smem.mainloop, cluster, warpgroup, params.comm.trace,
            [&](TileWork* work) {
              return tiles.next(work, Config::BLOCK_M,
                                [&](int position) { return rows_of(params, owner_at(params, position)); });
            },
            [&](const TileWork& work, int block, float(&accumulators)[Config::BLOCK_N / 2]) {
              finish_block<Config>(launch, params, smem, work, block, accumulators);
            });
      });
  launch.end_cta();
}

template <GemmTile TILE, class Element, bool B_TRANSPOSED>
constexpr RankGemmKernel<CudaParams> cuda_kernel_entry() {
  using Config = GemmConfig<TILE.block_m, TILE.block_n, TILE.ping_pong, Element, false, B_TRANSPOSED>;
  static_assert(sizeof(RankGemmStorage<Config>) <= 227 * 1024);
  return {gemm_reduction_kernel<Config>, Config::NUM_THREADS, sizeof(RankGemmStorage<Config>),
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

}  // namespace mk::gemm_reduce_scatter
