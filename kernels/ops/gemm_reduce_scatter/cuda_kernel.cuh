// SPDX-License-Identifier: MIT
// GEMM+ReduceScatter and GEMM+AllReduce as one persistent kernel. Partial tiles go from the epilogue straight
// into the slots of their rows' owner; each rank computes its own rows last, when the others' partials of them
// have mostly arrived, and sums in the epilogue.
#pragma once

#include "kernels/device/copy_rows.cuh"
#include "kernels/device/partial_sums.cuh"
#include "kernels/device/rank_gemm.cuh"
#include "kernels/ops/gemm_reduce_scatter/cuda_params.h"

namespace mk::gemm_reduce_scatter {

using CudaTable = RankGemmTable<CudaParams>;
const CudaTable& cuda_kernels_bf16();
const CudaTable& cuda_kernels_fp16();

// The next ranks first, this one last. One-shot: every rank owns all rows.
__device__ __forceinline__ int owner_at(const CudaParams& params, int position) {
  if (params.reduction == Reduction::one_shot) return params.comm.rank;
  const int owner = params.comm.rank + position + 1;
  return owner < params.comm.nranks ? owner : owner - params.comm.nranks;
}

// One-shot: max_rows is m, and every rank owns what begins at 0.
__device__ __forceinline__ int first_row_of(const CudaParams& params, int owner) {
  return params.reduction == Reduction::one_shot ? 0 : min(params.m, owner * params.max_rows);
}

__device__ __forceinline__ int rows_of(const CudaParams& params, int owner) {
  return min(params.max_rows, params.m - first_row_of(params, owner));
}

template <class Config>
__device__ __forceinline__ void produce(MainloopStorage<Config>& smem, const CudaParams& params) {
  ptx::prefetch_tensormap(&params.load.map_a);
  ptx::prefetch_tensormap(&params.load.map_b);
  RankTileCursor tiles(params.tiles, blockIdx.x, params.tile_rows);
  StageCursor<Config::NUM_STAGES> stages;
  TileWork work;
  while (tiles.next(&work, Config::BLOCK_M,
                    [&](int position) { return rows_of(params, owner_at(params, position)); })) {
    const RankTile tile = RankTileCursor::place(work, params.tile_rows);
    const int row = first_row_of(params, owner_at(params, tile.position)) + tile.index * Config::BLOCK_M;
    load_tile<Config>(smem, stages, params.load, &params.load.map_a, row, work, ClusterPosition{0, 1},
                      AIsReady());
  }
}

// What one flag of partials stands for: a chunk of an owner's rows, or, one-shot, 64 rows of a tile. A
// warpgroup that waits for the peers' rows in one-shot has pushed just as many, so a flag may not stand for
// more.
struct PartialUnit {
  int index;
  uint32_t arrivals;  // 16 rows of a tile each
};

template <class Config>
__device__ __forceinline__ PartialUnit partial_unit(const CudaParams& params, const TileWork& work, int owner,
                                                    int tile_index, int block) {
  constexpr uint32_t ARRIVALS_PER_TILE = Config::BLOCK_M / 16;
  if (params.reduction == Reduction::one_shot) {
    const int row_block = work.m_tile * (Config::BLOCK_M / 64) + block;
    return {row_block * params.tiles.num_n_tiles + work.n_tile, 4};
  }
  const int chunk = tile_index / params.chunk_tiles;
  const int tiles = (rows_of(params, owner) + Config::BLOCK_M - 1) / Config::BLOCK_M;
  const int tiles_of_chunk = min(params.chunk_tiles, tiles - chunk * params.chunk_tiles);
  return {chunk, static_cast<uint32_t>(tiles_of_chunk) * params.tiles.num_n_tiles * ARRIVALS_PER_TILE};
}

template <class Config>
__device__ __forceinline__ int units_per_source(const CudaParams& params) {
  return params.reduction == Reduction::one_shot ? params.tiles.num_tiles() * (Config::BLOCK_M / 64)
                                                 : params.num_chunks;
}

// Pushes a partial into this rank's slot at `to`.
template <int NUM_ACCUMULATORS>
__device__ __forceinline__ void push_partial(const RankLaunch& launch, const CudaParams& params, int to,
                                             float (&accumulators)[NUM_ACCUMULATORS], EpilogueBuffers& buffers,
                                             int row, int row_end, int column) {
  EpilogueParams slot{};
  slot.c = launch.area(to, params.comm.rank * params.slot_bytes);
  slot.ldc = params.slot_pitch / (params.comm_type == GemmType::fp32 ? 4 : 2);
  slot.n = params.output.n;
  slot.out_type = params.comm_type;
  slot.rows_aligned = true;
  store_tile_rows(accumulators, slot, buffers, row, row_end, column);
}

// 64 rows of a finished product: another owner's go there, this rank's own are summed.
template <class Config>
__device__ __forceinline__ void finish_block(const RankLaunch& launch, const CudaParams& params,
                                             EpilogueBuffers& buffers, const TileWork& work, int block,
                                             float (&accumulators)[Config::BLOCK_N / 2]) {
  const int rank = params.comm.rank;
  const int nranks = params.comm.nranks;
  const int lane = threadIdx.x % 32;
  const RankTile tile = RankTileCursor::place(work, params.tile_rows);
  const int owner = owner_at(params, tile.position);
  const int row = tile.index * Config::BLOCK_M + block * 64 + threadIdx.x / 32 % 4 * 16;
  const int row_end = rows_of(params, owner);
  const int column = work.n_tile * Config::BLOCK_N;
  const PartialUnit unit = partial_unit<Config>(params, work, owner, tile.index, block);
  const int units = units_per_source<Config>(params);
  const int own_flag = params.first_flag + rank * units + unit.index;
  uint32_t* counts = params.comm.state->first_counts;
  if (owner != rank) {
    push_partial(launch, params, owner, accumulators, buffers, row, row_end, column);
    if (arrive(&counts[owner * units + unit.index], unit.arrivals) && lane == 0)
      launch.raise_flag(owner, own_flag);
    return;
  }
  if (params.reduction == Reduction::one_shot) {
#pragma unroll 1
    for (int step = 1; step < nranks; ++step) {
      const int peer = rank + step < nranks ? rank + step : rank + step - nranks;
      push_partial(launch, params, peer, accumulators, buffers, row, row_end, column);
    }
    if (arrive(&counts[unit.index], unit.arrivals)) {
      for (int peer = lane; peer < nranks; peer += 32) {
        if (peer != rank) launch.raise_flag(peer, own_flag);
      }
    }
  }
  for (int source = lane; source < nranks; source += 32) {
    if (source == rank) continue;
    launch.wait_flag(params.first_flag + source * units + unit.index, DeviceRole::reduce, DeviceObject::partial,
                     source, unit.index);
  }
  __syncwarp();
  const PartialSlots slots = {launch.area(rank, 0), params.slot_bytes, params.slot_pitch, rank, nranks};
  const bool two_shot = params.reduction == Reduction::two_shot;
  FinishedRows to = {params.output,
                     params.reduction == Reduction::scatter ? 0 : first_row_of(params, rank),
                     params.reduction != Reduction::scatter,
                     nullptr,
                     0,
                     params.gather_pitch};
  if (two_shot) {
    to.peers = params.comm.memory;
    to.peer_offset = launch.area(rank, 0) - params.comm.memory[rank] + params.gather_begin +
                     int64_t{first_row_of(params, rank)} * params.gather_pitch;
  }
  reduce_tile_rows(accumulators, slots, to, params.comm_type, buffers, row, row_end, column);
  if (two_shot && arrive(&params.comm.state->second_counts[unit.index], unit.arrivals)) {
    for (int peer = lane; peer < nranks; peer += 32) {
      if (peer != rank)
        launch.raise_flag(peer, params.first_gather_flag + rank * params.num_chunks + unit.index);
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

// Two-shot: brings the other owners' finished rows from the receive area to C.
template <class Config>
__device__ __forceinline__ void gather_finished(const RankLaunch& launch, const CudaParams& params,
                                                const CopyWarp& warp) {
  const EpilogueParams& output = params.output;
  const int element_bytes = output.out_type == GemmType::fp32 ? 4 : 2;
  const int chunk_rows = params.chunk_tiles * Config::BLOCK_M;
  const int pieces_per_chunk = static_cast<int>(ceil_div(chunk_rows, params.piece_rows));
  const int pieces_per_owner = params.num_chunks * pieces_per_chunk;
#pragma unroll 1
  for (int idx = warp.index; idx < pieces_per_owner * (params.comm.nranks - 1); idx += warp.count) {
    // The same chunk of every owner, then the next: they finish at about the same time.
    const int piece = idx % pieces_per_chunk;
    const int chunk = idx / pieces_per_chunk / (params.comm.nranks - 1);
    const int position = idx / pieces_per_chunk % (params.comm.nranks - 1);
    const int owner = owner_at(params, position);
    const int64_t row = int64_t{chunk} * chunk_rows + piece * params.piece_rows;
    const int64_t row_end = min_of(rows_of(params, owner), int64_t{chunk + 1} * chunk_rows);
    if (row >= row_end) continue;
    launch.wait_flag(params.first_gather_flag + owner * params.num_chunks + chunk, DeviceRole::gather,
                     DeviceObject::reduced_chunk, owner, chunk);
    __syncwarp();
    const int64_t first = first_row_of(params, owner) + row;
    const int64_t rows = min_of(params.piece_rows, row_end - row);
    const std::byte* from = launch.area(params.comm.rank, params.gather_begin + first * params.gather_pitch);
    std::byte* to = static_cast<std::byte*>(output.c) + first * output.ldc * element_bytes;
    if (!output.accumulate && output.rows_aligned) {
      copy_rows(
          {to, from, output.ldc * element_bytes, params.gather_pitch, rows, int64_t{output.n} * element_bytes});
      continue;
    }
    for (int64_t i = 0; i < rows; ++i, from += params.gather_pitch, to += output.ldc * element_bytes) {
      if (!output.accumulate) {
        for (int at = threadIdx.x % 32 * 2; at < output.n * element_bytes; at += 64) {
          *reinterpret_cast<uint16_t*>(to + at) = *reinterpret_cast<const uint16_t*>(from + at);
        }
      } else if (output.out_type == GemmType::bf16) {
        add_row(reinterpret_cast<__nv_bfloat16*>(to), reinterpret_cast<const __nv_bfloat16*>(from), output.n);
      } else if (output.out_type == GemmType::fp16) {
        add_row(reinterpret_cast<__half*>(to), reinterpret_cast<const __half*>(from), output.n);
      } else {
        add_row(reinterpret_cast<float*>(to), reinterpret_cast<const float*>(from), output.n);
      }
    }
  }
}

template <class Config>
__global__ void __launch_bounds__(Config::NUM_THREADS, 1)
    gemm_reduction_kernel(const __grid_constant__ CudaParams params) {
  extern __shared__ __align__(1024) uint8_t smem_bytes[];
  RankGemmStorage<Config>& smem = *reinterpret_cast<RankGemmStorage<Config>*>(smem_bytes);
  const RankLaunch launch(params.comm);
  const ClusterPosition cluster = {0, 1};
  if (threadIdx.x == 0) mainloop_init<Config>(smem.mainloop, cluster);
  launch.begin_cta();
  __syncthreads();
  run_roles<Config>(
      [&] { produce<Config>(smem.mainloop, params); },
      [&](const CopyWarp& warp) {
        if (warp.is_first()) {
          launch.enter();
          launch.wait_entries();
        }
        if (params.reduction == Reduction::two_shot) gather_finished<Config>(launch, params, warp);
      },
      [&](int warpgroup) {
        RankTileCursor tiles(params.tiles, blockIdx.x, params.tile_rows);
        consumer_role<Config>(
            smem.mainloop, cluster, warpgroup,
            [&](TileWork* work) {
              return tiles.next(work, Config::BLOCK_M,
                                [&](int position) { return rows_of(params, owner_at(params, position)); });
            },
            [&](const TileWork& work, int block, float(&accumulators)[Config::BLOCK_N / 2]) {
              finish_block<Config>(launch, params, smem.epilogue[threadIdx.x / 32], work, block, accumulators);
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
