// SPDX-License-Identifier: MIT
// GEMM+ReduceScatter and GEMM+AllReduce of few bytes as one persistent kernel: what is exchanged goes straight
// from registers, in tagged packets (tagged_packets.h), and there is nothing beside the product but the
// entries.
#pragma once

#include "kernels/device/tagged_packets.cuh"
#include "kernels/ops/gemm_reduce_scatter/cuda_kernel.cuh"
#include "kernels/ops/gemm_reduce_scatter/tagged_params.h"

namespace mk::gemm_reduce_scatter::tagged {

using TaggedTable = RankGemmTable<TaggedParams, NUM_TAGGED_TILES>;
const TaggedTable& kernels_bf16();
const TaggedTable& kernels_fp16();

// Of a reduce-scatter all tiles are: with owners' tiles it has the other kernel.
__device__ __forceinline__ bool is_merged(const TaggedParams& params) {
  return params.reduction == Reduction::scatter;
}

// Where tagged packets of this epoch come to, at rank `rank`.
__device__ __forceinline__ std::byte* packet_area(const RankLaunch& launch, const TaggedParams& params,
                                                  int rank, int64_t offset) {
  return params.comm.memory[rank] + params.packets + launch.bank() * PACKET_BANK_BYTES + offset;
}

template <class Config>
constexpr int UNIT_BYTES = packets_bytes(SUM_COLUMNS<Config::BLOCK_N>);

// Units of an owner's tile there: slab by slab of the first columns, then of the next.
template <class Config>
__device__ __forceinline__ int64_t packet_offset(const TaggedParams& params, int tile, int slab, int columns) {
  return (int64_t{tile} * units_of_tile<Config>(params) + columns * (Config::BLOCK_M / 16) + slab) *
         UNIT_BYTES<Config>;
}

__device__ __forceinline__ uint32_t tag_of(const RankLaunch& launch) {
  return static_cast<uint32_t>(launch.epoch());
}

// A unit of 16 rows, for a lane to store its two of.
template <int COLUMNS>
__device__ __forceinline__ PacketRows rows_of_unit(std::byte* unit) {
  unit += threadIdx.x % 32 * 16;
  return {unit, unit + packet_place(8, 0, COLUMNS)};
}

// Merged tiles: where the elements that a lane has of a row of the product go, the first columns of the tile.
template <class Config>
__device__ __forceinline__ std::byte* owner_row(const RankLaunch& launch, const TaggedParams& params, int row,
                                                int n_tile) {
  constexpr int COLUMNS = SUM_COLUMNS<Config::BLOCK_N>;
  const MergedRows& rows = params.merged_rows;
  if (row >= rows.m) return nullptr;
  const OwnedRow owned = rows.owned(row);
  const int unit = rows.place({owned.row / 16, n_tile * (Config::BLOCK_N / COLUMNS)});
  return packet_area(launch, params, owned.owner,
                     params.comm.rank * params.packet_slot_bytes + int64_t{unit} * UNIT_BYTES<Config>) +
         packet_place(owned.row % 16, threadIdx.x % 32, COLUMNS);
}

// 16 rows of a finished product in packets: to their owners, or to everyone, this rank being the last.
template <class Config>
__device__ __forceinline__ void exchange_packets(const RankLaunch& launch, const TaggedParams& params,
                                                 const TilePlace& place, int slab,
                                                 const float (&accumulators)[Config::BLOCK_N / 2]) {
  constexpr int COLUMNS = SUM_COLUMNS<Config::BLOCK_N>;
  const int nranks = params.comm.nranks;
  const int64_t offset =
      params.comm.rank * params.packet_slot_bytes + packet_offset<Config>(params, place.tile, slab, 0);
  const int columns_pitch =
      (is_merged(params) ? params.merged_rows.pitch() : Config::BLOCK_M / 16) * UNIT_BYTES<Config>;
#pragma unroll 1
  for (int step = params.reduction == Reduction::one_shot ? 1 : nranks; step <= nranks; ++step) {
    const int peer = place.owner + step < nranks ? place.owner + step : place.owner + step - nranks;
    PacketRows to;
    if (is_merged(params)) {
      const int row = place.row + slab * 16 + threadIdx.x % 32 / 4;
      to = {owner_row<Config>(launch, params, row, place.n_tile),
            owner_row<Config>(launch, params, row + 8, place.n_tile)};
    } else {
      to = rows_of_unit<COLUMNS>(packet_area(launch, params, peer, offset));
    }
#pragma unroll
    for (int i = 0; i < Config::BLOCK_N / COLUMNS; ++i) {
      store_packets<COLUMNS>(accumulators + i * COLUMNS / 2, params.comm_type, to, i * columns_pitch,
                             tag_of(launch));
    }
  }
  __syncwarp();
}

// What a warp does while packets are not there: false, the launch is to end.
class PacketWaits {
 public:
  __device__ PacketWaits(const RankLaunch& launch, DeviceRole role, DeviceObject object, int tile)
      : launch_(launch),
        patience_(launch, PACKET_POLL_PAUSE_NS),
        role_(role),
        object_(object),
        tile_(static_cast<uint64_t>(tile)) {}
  __device__ bool operator()(int source) {
    return patience_.warp_goes_on({role_, object_, source, tile_, launch_.epoch() - 1, launch_.epoch()});
  }

 private:
  const RankLaunch& launch_;
  Patience patience_;
  const DeviceRole role_;
  const DeviceObject object_;
  const uint64_t tile_;
};

// Sums a unit of this rank's, of all sources, as they come; `tile`: of which it is a part. False: the launch is
// to end.
template <int N>
__device__ __forceinline__ bool sum_unit(const RankLaunch& launch, const TaggedParams& params, int tile,
                                         int64_t offset, int num_rows, float (&sums)[N]) {
  PacketWaits waits(launch, DeviceRole::reduce, DeviceObject::partial, tile);
#pragma unroll
  for (int i = 0; i < N; ++i) sums[i] = 0.0f;
  return sum_packets(sums, params.comm_type, packet_area(launch, params, params.comm.rank, offset),
                     params.packet_slot_bytes, params.comm.nranks, num_rows, tag_of(launch), waits);
}

// One-shot: 16 rows of all columns of a tile, which has been exchanged, to C. `row`, `row_end`: of the rows of
// C.
template <class Config>
__device__ __forceinline__ void finish_packets(const RankLaunch& launch, const TaggedParams& params,
                                               EpilogueBuffers<1>& buffers, const TilePlace& place, int slab,
                                               int row, int row_end) {
  constexpr int COLUMNS = SUM_COLUMNS<Config::BLOCK_N>;
#pragma unroll 1
  for (int i = 0; i < Config::BLOCK_N / COLUMNS; ++i) {
    float sums[COLUMNS / 2];
    if (!sum_unit(launch, params, place.tile, packet_offset<Config>(params, place.tile, slab, i), 16, sums))
      return;
    EpilogueParams output = params.output;
    const int column = place.n_tile * Config::BLOCK_N + i * COLUMNS;
    // All ranks add the same to their C.
    if (output.accumulate) round_result(sums, output, column);
    store_tile_rows(sums, output, buffers, row, row_end, column);
  }
}

// A unit that this rank sums, and where its packets lie.
struct PacketUnit : SlabUnit {
  int64_t offset;
  int num_rows;  // that come
};

template <class Config>
__device__ __forceinline__ PacketUnit packet_unit(const TaggedParams& params, int number) {
  constexpr int COLUMNS = SUM_COLUMNS<Config::BLOCK_N>;
  const int rank = params.comm.rank;
  PacketUnit unit;
  if (!is_merged(params)) {
    static_cast<SlabUnit&>(unit) = slab_unit<Config>(params, rank, number);
    unit.offset = packet_offset<Config>(params, unit.tile, unit.slab, unit.begin / COLUMNS);
    unit.num_rows = 16;
    return unit;
  }
  const MergedRows& rows = params.merged_rows;
  const MergedUnit place = rows.unit(rank, number);
  const int column = place.column_unit * COLUMNS;
  unit.n_tile = column / Config::BLOCK_N;
  unit.row = place.row_unit * 16;
  unit.num_rows = min(16, rows.rows(rank) - unit.row);
  unit.begin = column % Config::BLOCK_N;
  unit.columns = min(params.output.n - column, COLUMNS);
  unit.rows = unit.columns > 0 ? unit.num_rows : 0;
  // Where its first row is.
  unit.tile =
      (rows.first_row(rank) + unit.row) / Config::BLOCK_M * params.owner_tiles.num_n_tiles + unit.n_tile;
  unit.slab = (rows.first_row(rank) + unit.row) % Config::BLOCK_M / 16;
  unit.offset = int64_t{rows.place(place)} * UNIT_BYTES<Config>;
  return unit;
}

// The sums of this rank's own rows, by the consumer warps of all CTAs. A two-shot's go to C here, and in
// packets to the other ranks.
template <class Config>
__device__ __forceinline__ void finish_units(const RankLaunch& launch, const TaggedParams& params,
                                             RankGemmStorage<Config>& smem) {
  constexpr int COLUMNS = SUM_COLUMNS<Config::BLOCK_N>;
  const int rank = params.comm.rank;
  const int nranks = params.comm.nranks;
  const bool two_shot = params.reduction == Reduction::two_shot;
  const int num_units = is_merged(params) ? params.merged_rows.num_units(rank)
                                          : params.tiles_per_owner * units_of_tile<Config>(params);
  const int num_ctas = params.tiles.num_workers;
  for (int number = threadIdx.x / 32 * num_ctas + blockIdx.x; number < num_units;
       number += Config::NUM_CONSUMER_WARPS * num_ctas) {
    const PacketUnit unit = packet_unit<Config>(params, number);
    if (unit.rows == 0) continue;
    const Tracer tracer(params.comm.trace, TRACE_COMPUTE + threadIdx.x / 128);
    const uint64_t start = tracer.now();
    float sums[COLUMNS / 2];
    if (!sum_unit(launch, params, unit.tile, unit.offset, unit.num_rows, sums)) return;
    EpilogueParams output = params.output;
    const int column = unit.n_tile * Config::BLOCK_N + unit.begin;
    if (two_shot) {
      round_result(sums, output, column);
      const int64_t place = params.packet_gather_begin + rank * params.packet_slot_bytes + unit.offset;
#pragma unroll 1
      for (int step = 1; step < nranks; ++step) {
        const int peer = rank >= step ? rank - step : rank - step + nranks;
        store_packets<COLUMNS>(sums, output.out_type,
                               rows_of_unit<COLUMNS>(packet_area(launch, params, peer, place)), 0,
                               tag_of(launch));
      }
    }
    const int row = (two_shot ? first_row_of(params, rank) : 0) + unit.row;
    store_tile_rows(sums, output, smem.epilogue[threadIdx.x / 32], row, row + unit.rows, column);
    tracer.record(TraceKind::reduce, start, unit.tile);
  }
}

// Two-shot: brings what the other owners have finished from its packets to C.
template <class Config>
__device__ __forceinline__ void gather_packets(const RankLaunch& launch, const TaggedParams& params,
                                               RankGemmStorage<Config>& smem) {
  constexpr int COLUMNS = SUM_COLUMNS<Config::BLOCK_N>;
  const int num_others = params.comm.nranks - 1;
  const int num_units = params.tiles_per_owner * units_of_tile<Config>(params) * num_others;
  const int num_ctas = params.tiles.num_workers;
  for (int number = threadIdx.x / 32 * num_ctas + blockIdx.x; number < num_units;
       number += Config::NUM_CONSUMER_WARPS * num_ctas) {
    const int owner = owner_at(params, number % num_others);
    const SlabUnit unit = slab_unit<Config>(params, owner, number / num_others);
    if (unit.rows == 0) continue;
    const Tracer tracer(params.comm.trace, TRACE_COMPUTE + threadIdx.x / 128);
    const uint64_t start = tracer.now();
    float rows[COLUMNS / 2];
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; ++i) rows[i] = -0.0f;  // to which -0 can be added, too
    PacketWaits waits(launch, DeviceRole::gather, DeviceObject::reduced_tile, unit.tile);
    const int64_t place = params.packet_gather_begin + owner * params.packet_slot_bytes +
                          packet_offset<Config>(params, unit.tile, unit.slab, unit.begin / COLUMNS);
    if (!sum_packets(rows, params.output.out_type, packet_area(launch, params, params.comm.rank, place), 0, 1,
                     16, tag_of(launch), [&](int) { return waits(owner); })) {
      return;
    }
    EpilogueParams output = params.output;
    output.bias = nullptr;  // is in it
    const int row = first_row_of(params, owner) + unit.row;
    store_tile_rows(rows, output, smem.epilogue[threadIdx.x / 32], row, row + unit.rows,
                    unit.n_tile * Config::BLOCK_N + unit.begin);
    tracer.record(TraceKind::copy, start, unit.tile, owner);
  }
}

// 16 rows of each 64 of a finished product: to their owners, or, one-shot, to everyone, whose parts are then
// summed here.
template <class Config>
__device__ __forceinline__ void finish_block(const RankLaunch& launch, const TaggedParams& params,
                                             RankGemmStorage<Config>& smem, const TileWork& work, int block,
                                             const float (&accumulators)[Config::BLOCK_N / 2]) {
  const TilePlace place = place_of(params, work, Config::BLOCK_M);
  const int slab = block * 4 + threadIdx.x / 32 % 4;
  const int row = place.row + slab * 16;
  const int row_end = rows_of(params, place.owner);
  if (!__any_sync(~0u, row < row_end)) return;  // by a vote: see store_tile_rows()
  exchange_packets<Config>(launch, params, place, slab, accumulators);
  if (params.reduction != Reduction::one_shot) return;
  const Tracer tracer(params.comm.trace, TRACE_COMPUTE + threadIdx.x / 128);
  const uint64_t start = tracer.now();
  finish_packets<Config>(launch, params, smem.epilogue[threadIdx.x / 32], place, slab, row, row_end);
  tracer.record(TraceKind::reduce, start, trace_tile(work));
}

template <class Config>
__global__ void __launch_bounds__(Config::NUM_THREADS, 1)
    tagged_reduction_kernel(const __grid_constant__ TaggedParams params) {
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
      },
      [&](int warpgroup) __attribute__((always_inline)) {
        auto tiles = tile_cursor(params);
        consumer_role<Config>(
            smem.mainloop, warpgroup, params.comm.trace,
            [&](TileWork* work) { return next_tile<Config>(params, tiles, work); },
            [&](const TileWork& work, int block, float(&accumulators)[Config::BLOCK_N / 2]) {
              finish_block<Config>(launch, params, smem, work, block, accumulators);
            });
        if (params.reduction != Reduction::one_shot) finish_units<Config>(launch, params, smem);
        if (params.reduction == Reduction::two_shot) gather_packets<Config>(launch, params, smem);
      });
  launch.end_cta();
}

template <GemmTile TILE, class Element, bool B_TRANSPOSED>
constexpr RankGemmKernel<TaggedParams> kernel_entry() {
  using Config = GemmConfig<TILE.block_m, TILE.block_n, TILE.ping_pong, Element, false, B_TRANSPOSED>;
  static_assert(SUM_COLUMNS<Config::BLOCK_N> == TAGGED_COLUMNS);
  return {tagged_reduction_kernel<Config>, Config::NUM_THREADS, sizeof(RankGemmStorage<Config>)};
}

template <class Element>
const TaggedTable& kernel_table() {
  static const TaggedTable table = []<size_t... TILES>(std::index_sequence<TILES...>) {
    return TaggedTable{{{kernel_entry<TAGGED_TILES[TILES], Element, false>(),
                         kernel_entry<TAGGED_TILES[TILES], Element, true>()}...}};
  }
  (std::make_index_sequence<NUM_TAGGED_TILES>());
  return table;
}

}  // namespace mk::gemm_reduce_scatter::tagged
