// SPDX-License-Identifier: MIT
// GEMM+ReduceScatter and GEMM+AllReduce as one persistent kernel. The epilogue leaves partial tiles in a small
// ring in device memory (the L2), and the push warps send them to the slots of their rows' owner while the next
// tile is computed. In each round a rank computes its own tiles last, when the others' partials of them have
// mostly arrived, and sums in the epilogue or, where there is time, in the push warps.
#pragma once

#include "kernels/device/copy_rows.cuh"
#include "kernels/device/ctas_in_step.cuh"
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

// A CTA's tiles.
__device__ __forceinline__ OwnerTileCursor<> tile_cursor(const CudaParams& params) {
  return {params.owner_tiles, params.tiles.num_k_steps, static_cast<int>(blockIdx.x), params.tiles.num_workers};
}

// One-shot, and where owners share out columns: max_rows is m, and every rank owns what begins at 0.
__device__ __forceinline__ int first_row_of(const CudaParams& params, int owner) {
  return params.splits_rows ? min(params.m, owner * params.max_rows) : 0;
}

__device__ __forceinline__ int rows_of(const CudaParams& params, int owner) {
  return min(params.max_rows, params.m - first_row_of(params, owner));
}

// Columns of tiles before an owner's first.
__device__ __forceinline__ int first_n_tile_of(const CudaParams& params, int owner) {
  return params.splits_columns ? owner * params.owner_tiles.num_n_tiles : 0;
}

template <class Config>
__device__ __forceinline__ bool next_tile(const CudaParams& params, OwnerTileCursor<>& tiles, TileWork* work) {
  return tiles.next(work, [&](const OwnerTile& tile) {
    const int owner = owner_at(params, tile.position);
    return tile.row * Config::BLOCK_M < rows_of(params, owner) &&
           first_n_tile_of(params, owner) + tile.column < params.tiles.num_n_tiles;
  });
}

// Where a tile is: whose, the how-manieth of that owner's (by which flags and slots are counted), and its place
// in the whole product. `row`: the owner's.
struct TilePlace {
  int owner;
  int tile;
  int n_tile;
  int row;
};

template <class Params>
__device__ __forceinline__ TilePlace place_of(const Params& params, const TileWork& work, int block_m) {
  const RankTile tile = params.order.place(work);
  const int owner = owner_at(params, tile.position);
  return {owner, tile.index * params.owner_tiles.num_n_tiles + work.n_tile,
          first_n_tile_of(params, owner) + work.n_tile, tile.index * block_m};
}

template <class Config, class Params>
__device__ __forceinline__ void produce(MainloopStorage<Config>& smem, const Params& params) {
  ptx::prefetch_tensormap(&params.load.map_a);
  ptx::prefetch_tensormap(&params.load.map_b);
  auto tiles = tile_cursor(params);
  StageCursor<Config::NUM_STAGES> stages;
  const CtasInStep in_step(&params.comm.state->num_near, params.tiles.num_workers,
                           Config::IS_LARGE ? params.tiles.near_k_steps : 0);
  in_step.begin();
  TileWork work;
  for (int ordinal = 0; next_tile<Config>(params, tiles, &work); ++ordinal) {
    const TilePlace place = place_of(params, work, Config::BLOCK_M);
    const Tracer tracer(params.comm.trace, TRACE_LOAD);
    tracer.begin(TraceKind::load, trace_tile(work));
    TileWork load = work;
    load.n_tile = place.n_tile;
    if (ordinal > 0) in_step.await_others(ordinal);
    load_tile<Config>(smem, stages, params.load,
                      {&params.load.map_a, first_row_of(params, place.owner) + place.row,
                       rows_of(params, place.owner) - place.row},
                      load, [&](int k_step) { in_step.at_k_step(k_step, work.k_begin, work.k_end); });
    tracer.end();
  }
  in_step.leave();
}

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

// What goes straight from registers has a flag for each 16 rows, since a warp does not wait for another; what
// push warps send has one a tile.
template <class Config>
__device__ __forceinline__ int partial_flag(const CudaParams& params, int source, int tile, int slab) {
  const int number = source * params.tiles_per_owner + tile;
  return params.first_flag + (params.is_direct ? number * (Config::BLOCK_M / 16) + slab : number);
}

// Of the other sources.
template <class Config>
__device__ __forceinline__ void wait_partials(const RankLaunch& launch, const CudaParams& params, int tile,
                                              int slab) {
  for (int first = 0; first < params.comm.nranks; first += 32) {
    const int source = first + threadIdx.x % 32;
    launch.wait_flags(source < params.comm.nranks && source != params.comm.rank,
                      partial_flag<Config>(params, source, tile, slab), DeviceRole::reduce,
                      DeviceObject::partial, source, tile);
  }
}

template <class Config>
__device__ __forceinline__ int64_t slab_offset(const CudaParams& params, int slab) {
  return int64_t{slab} * slab_bytes<Config::BLOCK_N>(element_bytes_of(params.comm_type));
}

// Where the sources' partials of 16 rows of an own tile lie.
template <class Config>
__device__ __forceinline__ PartialSlabs slabs_of(const RankLaunch& launch, const CudaParams& params, int tile,
                                                 int slab) {
  return {
      launch.area(params.comm.rank, slot_offset<Config>(params, 0, tile) + slab_offset<Config>(params, slab)),
      params.slot_bytes, params.comm.nranks};
}

// A two-shot's own rows go straight to C, and from there to the peers, unless they are added to C, or the bulk
// copy engine could not take them from there.
__device__ __forceinline__ bool sums_to_c(const CudaParams& params) {
  const EpilogueParams& output = params.output;
  if (output.accumulate) return false;
  return params.is_direct || (output.rows_aligned && output.n * element_bytes_of(output.out_type) % 16 == 0);
}

// Otherwise they go into the gathered result in the receive area, as the other owners' rows do.
__device__ __forceinline__ EpilogueParams gathered_output(const RankLaunch& launch, const CudaParams& params) {
  EpilogueParams output = params.output;
  output.c = launch.area(params.comm.rank, params.gather_begin);
  output.ldc = params.gather_pitch / element_bytes_of(output.out_type);
  output.accumulate = false;
  output.rows_aligned = true;
  return output;
}

// 16 rows of a finished product, straight from the registers: to its owner, which may be this rank, or to
// everyone.
template <class Config>
__device__ __forceinline__ void exchange_slab(const RankLaunch& launch, const CudaParams& params,
                                              const TilePlace& place, int slab,
                                              const float (&accumulators)[Config::BLOCK_N / 2]) {
  const int rank = params.comm.rank;
  const int nranks = params.comm.nranks;
  const bool one_shot = params.reduction == Reduction::one_shot;
  const int64_t offset = slot_offset<Config>(params, rank, place.tile) + slab_offset<Config>(params, slab);
  // This rank itself comes last.
#pragma unroll 1
  for (int step = one_shot ? 1 : nranks; step <= nranks; ++step) {
    const int peer = place.owner + step < nranks ? place.owner + step : place.owner + step - nranks;
    store_slab(accumulators, params.comm_type, launch.area(peer, offset));
  }
  __syncwarp();
  const int flag = partial_flag<Config>(params, rank, place.tile, slab);
  if (!one_shot) {
    if (threadIdx.x % 32 == 0) launch.raise_flag(place.owner, flag);
    return;
  }
  for (int peer = threadIdx.x % 32; peer < nranks; peer += 32) {
    if (peer != rank) launch.raise_flag(peer, flag);
  }
}

// Is this rank's own tile summed by its CTA's push warps, while the next one is computed? They leave to the
// consumers what is more than a sum, for which they have no registers, and the CTA's last tile.
__device__ __forceinline__ bool push_warps_sum(const CudaParams& params, const TileWork& work) {
  const EpilogueParams& output = params.output;
  return params.sums_beside && !work.is_last && !output.accumulate && output.bias == nullptr &&
         output.rows_aligned && output.n % 8 == 0;
}

// Where this rank's sums go.
__device__ __forceinline__ EpilogueParams own_output(const RankLaunch& launch, const CudaParams& params) {
  const bool is_gathered = params.reduction == Reduction::two_shot && !sums_to_c(params);
  return is_gathered ? gathered_output(launch, params) : params.output;
}

// 64 rows of a finished product: another owner's go there, this rank's own are summed, here or by the push
// warps; but what is exchanged straight from the registers is summed when all tiles are computed
// (finish_units), unless every rank sums all.
template <class Config>
__device__ __forceinline__ void finish_block(const RankLaunch& launch, const CudaParams& params,
                                             RankGemmStorage<Config>& smem, const TileWork& work, int block,
                                             const float (&accumulators)[Config::BLOCK_N / 2]) {
  const int rank = params.comm.rank;
  const TilePlace place = place_of(params, work, Config::BLOCK_M);
  const int slab = block * 4 + threadIdx.x / 32 % 4;
  const int row = place.row + slab * 16;
  const int row_end = rows_of(params, place.owner);
  // By votes: see store_tile_rows().
  const bool has_rows = __any_sync(~0u, row < row_end);
  const bool is_own = __any_sync(~0u, place.owner == rank);
  // Tiles are counted through the ring, though nothing of a reduce-scatter's own tile is staged.
  if (!params.is_direct) wait_staging(smem, work.ordinal);
  if (has_rows && params.is_direct) {
    exchange_slab<Config>(launch, params, place, slab, accumulators);
  } else if (has_rows) {
    std::byte* const to = is_own ? launch.area(rank, slot_offset<Config>(params, rank, place.tile))
                                 : staged_tile<Config>(params, work.ordinal % NUM_STAGED_TILES);
    store_slab(accumulators, params.comm_type, to + slab_offset<Config>(params, slab));
  }
  const bool sums_here =
      params.is_direct ? params.reduction == Reduction::one_shot : !push_warps_sum(params, work);
  if (has_rows && is_own && sums_here) {
    wait_partials<Config>(launch, params, place.tile, slab);
    const Tracer tracer(params.comm.trace, TRACE_COMPUTE + threadIdx.x / 128);
    const uint64_t start = tracer.now();
    const int first_row = params.reduction == Reduction::two_shot ? first_row_of(params, rank) : 0;
    finish_slab<Config::BLOCK_N>(slabs_of<Config>(launch, params, place.tile, slab), params.comm_type,
                                 own_output(launch, params), params.reduction == Reduction::one_shot,
                                 smem.epilogue[threadIdx.x / 32], first_row + row, first_row + row_end,
                                 place.n_tile * Config::BLOCK_N);
    tracer.record(TraceKind::reduce, start, trace_tile(work));
  }
  if (!params.is_direct) pass_to_push_warps(smem, work.ordinal);
}

// What a warp sums, or brings to C, at a time: 16 rows of an owner's tile, of all columns or, where the tiles
// are exchanged straight from registers, of a few.
struct SlabUnit {
  int tile;  // among its owner's
  int n_tile;
  int row;   // the owner's
  int rows;  // 0: there are none
  int slab;
  int begin;    // columns of the tile
  int columns;  // as far as there are
};

template <class Config>
__device__ __forceinline__ int units_of_tile(const CudaParams& params) {
  return Config::BLOCK_M / 16 * (params.is_direct ? Config::BLOCK_N / SUM_COLUMNS<Config::BLOCK_N> : 1);
}

template <class Config>
__device__ __forceinline__ SlabUnit slab_unit(const CudaParams& params, int owner, int number) {
  const int unit_columns = params.is_direct ? SUM_COLUMNS<Config::BLOCK_N> : Config::BLOCK_N;
  const OwnerTile place = params.owner_tiles.of_owner(number / units_of_tile<Config>(params));
  const int in_tile = number % units_of_tile<Config>(params);
  SlabUnit unit;
  unit.tile = place.row * params.owner_tiles.num_n_tiles + place.column;
  unit.n_tile = first_n_tile_of(params, owner) + place.column;
  unit.slab = in_tile % (Config::BLOCK_M / 16);
  unit.row = place.row * Config::BLOCK_M + unit.slab * 16;
  unit.begin = in_tile / (Config::BLOCK_M / 16) * unit_columns;
  unit.columns = min(params.output.n - unit.n_tile * Config::BLOCK_N - unit.begin, unit_columns);
  unit.rows = unit.columns > 0 ? max(0, min(16, rows_of(params, owner) - unit.row)) : 0;
  return unit;
}

// Of finished rows: a tile, or, direct, each unit of it has a flag.
template <class Config>
__device__ __forceinline__ int gather_flag(const CudaParams& params, int owner, const SlabUnit& unit) {
  const int number = owner * params.tiles_per_owner + unit.tile;
  if (!params.is_direct) return params.first_gather_flag + number;
  return params.first_gather_flag + number * units_of_tile<Config>(params) +
         unit.begin / SUM_COLUMNS<Config::BLOCK_N> * (Config::BLOCK_M / 16) + unit.slab;
}

// Waits for all sources' partials of as many units as a warp has lanes to look at them, from `number` on: the
// two round trips that a flag takes then are those of all.
template <class Config>
__device__ __forceinline__ void wait_units(const RankLaunch& launch, const CudaParams& params, int number,
                                           int stride, int num_units) {
  const int nranks = params.comm.nranks;
  const int lane = threadIdx.x % 32;
  for (int source = lane % nranks; source < nranks; source += 32) {
    const int own = number + lane / nranks * stride;
    if (lane / nranks >= max(1, 32 / nranks) || own >= num_units) break;
    const SlabUnit unit = slab_unit<Config>(params, params.comm.rank, own);
    if (unit.rows == 0) break;
    launch.wait_flag(partial_flag<Config>(params, source, unit.tile, unit.slab), DeviceRole::reduce,
                     DeviceObject::partial, source, unit.tile);
  }
  __syncwarp();
}

// Direct: the sums of this rank's own tiles, by the consumer warps of all CTAs; a two-shot's go to all ranks at
// once.
template <class Config>
__device__ __forceinline__ void finish_units(const RankLaunch& launch, const CudaParams& params,
                                             RankGemmStorage<Config>& smem) {
  const int rank = params.comm.rank;
  const int nranks = params.comm.nranks;
  const bool two_shot = params.reduction == Reduction::two_shot;
  const bool writes_outputs = two_shot && launch.writes_outputs();
  const int num_units = params.tiles_per_owner * units_of_tile<Config>(params);
  const int num_ctas = params.tiles.num_workers;
  const int stride = Config::NUM_CONSUMER_WARPS * num_ctas;
  const int num_together = max(1, 32 / nranks);
  int num_waited = 0;
  for (int number = threadIdx.x / 32 * num_ctas + blockIdx.x; number < num_units; number += stride) {
    if (num_waited-- == 0) {
      wait_units<Config>(launch, params, number, stride, num_units);
      num_waited = num_together - 1;
    }
    const SlabUnit unit = slab_unit<Config>(params, rank, number);
    if (unit.rows == 0) continue;
    const Tracer tracer(params.comm.trace, TRACE_COMPUTE + threadIdx.x / 128);
    const uint64_t start = tracer.now();
    const int row = (two_shot ? first_row_of(params, rank) : 0) + unit.row;
    finish_columns<Config::BLOCK_N>(
        slabs_of<Config>(launch, params, unit.tile, unit.slab), params.comm_type, params.output,
        two_shot ? nranks : 1,
        [&](int step, EpilogueParams* output) {
          if (!two_shot || (step == 0 && sums_to_c(params))) return;
          const int peer = rank >= step ? rank - step : rank - step + nranks;
          if (writes_outputs) {
            output->c = params.comm.outputs[peer];
            return;
          }
          const void* const bias = output->bias;  // none, if it has been added
          *output = gathered_output(launch, params);
          output->c = launch.area(peer, params.gather_begin);
          output->bias = bias;
        },
        smem.epilogue[threadIdx.x / 32], row, row + unit.rows, unit.n_tile * Config::BLOCK_N, unit.begin);
    tracer.record(TraceKind::reduce, start, unit.tile);
  }
  if (!two_shot) return;
  // Behind all units: the fence waits until what has been stored is there, which would hold up the next unit.
  __syncwarp();
  ptx::fence_acq_rel_sys();
  for (int number = threadIdx.x / 32 * num_ctas + blockIdx.x; number < num_units; number += stride) {
    const SlabUnit unit = slab_unit<Config>(params, rank, number);
    if (unit.rows == 0) continue;
    for (int peer = threadIdx.x % 32; peer < nranks; peer += 32) {
      launch.raise_flag_relaxed(peer, gather_flag<Config>(params, rank, unit));
    }
  }
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

// A piece of an own tile: some columns of a slab.
struct OwnPiece {
  int slab;
  int begin;
};

// Push warps, of an own tile: sums it to C, 16 * CHUNKS columns of a slab at a time. The bulk copy engine
// brings the partials to shared memory, since push warps have too few registers for many loads in flight.
template <class Config, int CHUNKS, class Push>
__device__ __forceinline__ void sum_tile(const RankLaunch& launch, const CudaParams& params, Push& push,
                                         int warp, const TilePlace& place, int num_rows) {
  constexpr int COLUMNS = 16 * CHUNKS;
  constexpr int SOURCE_BYTES = CHUNKS * 512;
  constexpr int PIECES = Config::BLOCK_N / COLUMNS;  // of a slab
  constexpr int LANES_PER_ROW = COLUMNS / 8;
  constexpr int ROW_PITCH = COLUMNS * 2 + 16;  // no two rows of a matrix in the same banks
  static_assert(Config::BLOCK_N % COLUMNS == 0 && 16 * ROW_PITCH <= Push::PIECE_BYTES);
  static_assert(SOURCE_BYTES * (CHUNKS > 2 ? 2 : MOST_SOURCES_BESIDE) <= Push::PIECE_BYTES);
  const int nranks = params.comm.nranks;
  const bool is_bf16 = params.comm_type == GemmType::bf16;
  const int lane = threadIdx.x % 32;
  const int64_t first_row =
      (params.reduction == Reduction::two_shot ? first_row_of(params, params.comm.rank) : 0) + place.row;
  int next = warp;
  push.template move<OwnPiece>(
      [&](OwnPiece* piece) {
        *piece = {next / PIECES, next % PIECES * COLUMNS};
        next += NUM_PUSH_WARPS;
        return piece->slab * 16 < num_rows;
      },
      [&](const OwnPiece& piece, uint8_t* buffer, uint64_t* loaded) {
        if (lane == 0) ptx::mbarrier_arrive_expect_tx(loaded, nranks * SOURCE_BYTES);
        __syncwarp();
        if (lane >= nranks) return;
        const PartialSlabs slabs = slabs_of<Config>(launch, params, place.tile, piece.slab);
        ptx::cp_async_bulk_shared_global(buffer + lane * SOURCE_BYTES,
                                         slabs.first + lane * slabs.slot_bytes + piece.begin / 16 * 512,
                                         SOURCE_BYTES, loaded);
      },
      [&](const OwnPiece& piece, uint8_t* buffer) {
        float sums[8 * CHUNKS];
#pragma unroll
        for (float& sum : sums) sum = 0.0f;
#pragma unroll 1
        for (int source = 0; source < nranks; ++source) {
          const uint4* chunks = reinterpret_cast<const uint4*>(buffer + source * SOURCE_BYTES) + lane;
#pragma unroll
          for (int i = 0; i < CHUNKS; ++i) {
            if (is_bf16) {
              PartialChunk<__nv_bfloat16>::add(sums + 8 * i, chunks[32 * i]);
            } else {
              PartialChunk<__half>::add(sums + 8 * i, chunks[32 * i]);
            }
          }
        }
        __syncwarp();  // all have read what is now written over
        const uint32_t row =
            ptx::smem_address(buffer) + (lane % 8 + lane / 8 % 2 * 8) * ROW_PITCH + lane / 16 * 16;
#pragma unroll
        for (int i = 0; i < CHUNKS; ++i) {
          const uint4 sum = is_bf16 ? PartialChunk<__nv_bfloat16>::pack(sums + 8 * i)
                                    : PartialChunk<__half>::pack(sums + 8 * i);
          ptx::stmatrix_x4(row + 32 * i, sum.x, sum.y, sum.z, sum.w);
        }
        __syncwarp();
        const int lane_row = lane / LANES_PER_ROW;
        const int chunk = lane % LANES_PER_ROW;
        const int column = place.n_tile * Config::BLOCK_N + piece.begin + chunk * 8;
        const int rows = column < params.output.n ? num_rows - piece.slab * 16 - lane_row : 0;
        std::byte* to = static_cast<std::byte*>(params.output.c) +
                        ((first_row + piece.slab * 16 + lane_row) * params.output.ldc + column) * 2;
#pragma unroll
        for (int i = 0; i < 16; i += 32 / LANES_PER_ROW) {
          const uint4 sum =
              ptx::ld_shared_v4(ptx::smem_address(buffer) + (lane_row + i) * ROW_PITCH + chunk * 16);
          if (i < rows) *reinterpret_cast<uint4*>(to + i * params.output.ldc * 2) = sum;
        }
        ptx::fence_proxy_async_shared_cta();  // the next piece comes by the bulk copy engine
      });
}

// The same, of partials that have all come.
template <class Config, class Push>
__device__ __forceinline__ void sum_own_tile(const RankLaunch& launch, const CudaParams& params, Push& push,
                                             int warp, const TilePlace& place, int num_rows) {
  // Two sources' partials of twice as many columns fit.
  constexpr int MOST_CHUNKS = Config::BLOCK_N % 64 == 0 ? 4 : 2;
  ptx::fence_proxy_async_global();  // another proxy than that of the loads that saw the flags
  if (params.comm.nranks <= 2) {
    sum_tile<Config, MOST_CHUNKS>(launch, params, push, warp, place, num_rows);
  } else {
    sum_tile<Config, 2>(launch, params, push, warp, place, num_rows);
  }
}

// A piece of a finished tile: its first row.
struct FinishedPiece {
  int row;
};

// Rows of a finished tile, from C, or from where this rank has gathered them, to where every peer gathers them,
// or to C of all ranks that do not have them there.
template <class Config, class Push>
__device__ __forceinline__ void push_finished(const RankLaunch& launch, const CudaParams& params, Push& push,
                                              int warp, int first_row, int num_rows, int column) {
  const int rank = params.comm.rank;
  const bool writes_outputs = launch.writes_outputs();
  const bool are_in_c = sums_to_c(params);
  const int lane = threadIdx.x % 32;
  const int element_bytes = element_bytes_of(params.output.out_type);
  const int rows_per_piece = 16 / element_bytes;
  static_assert(Config::BLOCK_N * 16 <= Push::PIECE_BYTES);
  const int buffer_pitch = Config::BLOCK_N * element_bytes;
  const int row_bytes = (min(params.output.n - column, Config::BLOCK_N) * element_bytes + 15) / 16 * 16;
  const int64_t begin = params.gather_begin + first_row * params.gather_pitch + column * int64_t{element_bytes};
  const int64_t pitch_in_c = params.output.ldc * element_bytes;
  const int64_t begin_in_c = first_row * pitch_in_c + column * int64_t{element_bytes};
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
        const int row = piece.row + lane;
        const std::byte* const from =
            are_in_c ? static_cast<const std::byte*>(params.output.c) + begin_in_c + row * pitch_in_c
                     : launch.area(rank, begin + row * params.gather_pitch);
        ptx::cp_async_bulk_shared_global(buffer + lane * buffer_pitch, from, row_bytes, loaded);
      },
      [&](const FinishedPiece& piece, const uint8_t* buffer) {
        keep_pace(params, push);
        if (lane < min(rows_per_piece, num_rows - piece.row)) {
          const int64_t row = piece.row + lane;
          const int64_t offset =
              writes_outputs ? begin_in_c + row * pitch_in_c : begin + row * params.gather_pitch;
#pragma unroll 1
          for (int step = writes_outputs && !are_in_c ? 0 : 1; step < params.comm.nranks; ++step) {
            const int peer = rank >= step ? rank - step : rank - step + params.comm.nranks;
            std::byte* const to =
                writes_outputs ? params.comm.outputs[peer] + offset : launch.area(peer, offset);
            ptx::cp_async_bulk_global_shared(to, buffer + lane * buffer_pitch, row_bytes);
          }
        }
        ptx::cp_async_bulk_commit_group();
      });
}

// Both push warps of a CTA: what the consumers finish, as long as peers want it, and sums of own tiles.
template <class Config>
__device__ __forceinline__ void push_tiles(const RankLaunch& launch, const CudaParams& params,
                                           RankGemmStorage<Config>& smem, int warp) {
  const int rank = params.comm.rank;
  const int lane = threadIdx.x % 32;
  BulkPush push(smem.push, warp);
  auto tiles = tile_cursor(params);
  TileWork work;
  while (next_tile<Config>(params, tiles, &work)) {
    const TilePlace place = place_of(params, work, Config::BLOCK_M);
    const int owner = place.owner;
    const int tile = place.tile;
    const int num_rows = min(Config::BLOCK_M, rows_of(params, owner) - place.row);
    const int slot = work.ordinal % NUM_STAGED_TILES;
    mbarrier_wait(&smem.staged_full[slot], work.ordinal / NUM_STAGED_TILES % 2);
    __syncwarp();  // all lanes have seen this phase before one lets the next begin
    const bool is_own = owner == rank;
    const bool sums = is_own && push_warps_sum(params, work);
    // Nothing of an own tile is staged: it lies where the others' partials of it do.
    if (is_own && lane == 0) ptx::mbarrier_arrive(&smem.staged_empty[slot]);
    if (is_own && !sums && params.reduction != Reduction::two_shot) continue;
    if (sums) wait_partials<Config>(launch, params, tile, 0);
    const Tracer tracer(params.comm.trace, TRACE_COPY + warp);
    tracer.begin(sums ? TraceKind::reduce : TraceKind::copy, trace_tile(work), owner);
    if (sums) {
      sum_own_tile<Config>(launch, params, push, warp, place, num_rows);
      tracer.end();
      if (params.reduction != Reduction::two_shot) continue;
      ptx::fence_proxy_async_global();  // the bulk copy engine reads what has been summed
      ptx::barrier_sync(PUSH_BARRIER, NUM_PUSH_WARPS * 32);
      tracer.begin(TraceKind::copy, trace_tile(work), owner);
    }
    if (is_own) {
      push_finished<Config>(launch, params, push, warp, first_row_of(params, rank) + place.row, num_rows,
                            place.n_tile * Config::BLOCK_N);
    } else {
      push_partial<Config>(params, push, warp, work,
                           launch.area(owner, slot_offset<Config>(params, rank, tile)), num_rows);
      if (lane == 0) ptx::mbarrier_arrive(&smem.staged_empty[slot]);
    }
    push.template complete<0>();
    tracer.end();
    ptx::barrier_sync(PUSH_BARRIER, NUM_PUSH_WARPS * 32);
    if (warp != 0) continue;
    if (!is_own) {
      if (lane == 0) launch.raise_flag(owner, partial_flag<Config>(params, rank, tile, 0));
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

// Two-shot: brings the owners' finished rows from the receive area to C, or waits until owners have, in the
// order in which these, all at the same time, finish them. Pieces are handed out one by one, because the push
// warps come late.
template <class Config>
__device__ __forceinline__ void gather_finished(const RankLaunch& launch, const CudaParams& params) {
  const int nranks = params.comm.nranks;
  const int element_bytes = element_bytes_of(params.output.out_type);
  // The next owners' first, this rank's, which are mostly there already, last.
  const int num_owners = sums_to_c(params) ? nranks - 1 : nranks;
  const int num_units = params.tiles_per_owner * num_owners * units_of_tile<Config>(params);
  launch.wait_for_outputs();
  while (true) {
    int number = 0;
    if (threadIdx.x % 32 == 0) number = atomicAdd(&launch.progress().gather_ticket, 1u);
    number = __shfl_sync(~0u, number, 0);
    if (number >= num_units) return;
    // All units of one owner's tile, then the next owner's.
    const int in_tile = number % units_of_tile<Config>(params);
    const int tiles = number / units_of_tile<Config>(params);
    const int owner = owner_at(params, tiles % num_owners);
    const SlabUnit unit =
        slab_unit<Config>(params, owner, tiles / num_owners * units_of_tile<Config>(params) + in_tile);
    if (unit.rows == 0) continue;
    launch.wait_flag(gather_flag<Config>(params, owner, unit), DeviceRole::gather, DeviceObject::reduced_tile,
                     owner, unit.tile);
    __syncwarp();
    if (launch.has_open_outputs()) continue;  // asked anew: a register for it would cost the consumers theirs
    const int64_t first = first_row_of(params, owner) + unit.row;
    const int column = unit.n_tile * Config::BLOCK_N + unit.begin;
    const Tracer tracer(params.comm.trace, trace_track());
    tracer.begin(TraceKind::copy, unit.tile, owner);
    bring_rows(params.output,
               static_cast<std::byte*>(params.output.c) + (first * params.output.ldc + column) * element_bytes,
               launch.area(params.comm.rank,
                           params.gather_begin + first * params.gather_pitch + int64_t{column} * element_bytes),
               params.gather_pitch, unit.rows, unit.columns);
    tracer.end();
  }
}

template <class Config>
__global__ void __launch_bounds__(Config::NUM_THREADS, 1)
    gemm_reduction_kernel(const __grid_constant__ CudaParams params) {
  extern __shared__ __align__(1024) uint8_t smem_bytes[];
  RankGemmStorage<Config>& smem = *reinterpret_cast<RankGemmStorage<Config>*>(smem_bytes);
  const RankLaunch launch(params.comm);
  if (threadIdx.x == 0) storage_init(smem);
  launch.begin_cta();
  __syncthreads();
  run_roles<Config>(
      params.tiles.num_workers, [&] { produce<Config>(smem.mainloop, params); },
      [&](const CopyWarp& warp) {
        if (warp.greets()) launch.greet();
        if (warp.pushes() && !params.is_direct) push_tiles<Config>(launch, params, smem, warp.warp);
        if (params.reduction == Reduction::two_shot) gather_finished<Config>(launch, params);
      },
      [&](int warpgroup) __attribute__((always_inline)) {
        auto tiles = tile_cursor(params);
        consumer_role<Config, TileWork, Config::IS_LARGE ? TilesAre::alike : TilesAre::settled>(
            smem.mainloop, warpgroup, params.comm.trace,
            [&](TileWork* work) { return next_tile<Config>(params, tiles, work); },
            [&](const TileWork& work, int block, float(&accumulators)[Config::BLOCK_N / 2]) {
              finish_block<Config>(launch, params, smem, work, block, accumulators);
            });
        if (params.is_direct && params.reduction != Reduction::one_shot)
          finish_units<Config>(launch, params, smem);
        if (params.reduction == Reduction::two_shot) gather_finished<Config>(launch, params);
      });
  launch.end_cta();
}

template <GemmTile TILE, class Element, bool B_TRANSPOSED>
constexpr RankGemmKernel<CudaParams> cuda_kernel_entry() {
  using Config = GemmConfig<TILE.block_m, TILE.block_n, TILE.ping_pong, Element, false, B_TRANSPOSED>;
  static_assert(sizeof(RankGemmStorage<Config>) <= 227 * 1024);
  return {gemm_reduction_kernel<Config>, Config::NUM_THREADS, sizeof(RankGemmStorage<Config>)};
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
