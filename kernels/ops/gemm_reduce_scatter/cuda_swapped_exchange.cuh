// SPDX-License-Identifier: MIT
// What becomes of a reduction's swapped tiles: they go straight from registers, a row to its owner, whichever
// tile it is in, or to everyone; when a CTA has had all of its own, its consumer warps share out the sums with
// those of all others.
#pragma once

#include "kernels/device/row_pieces.cuh"
#include "kernels/device/swapped_epilogue.cuh"
#include "kernels/ops/gemm_reduce_scatter/cuda_kernel.cuh"
#include "kernels/ops/gemm_reduce_scatter/swapped_params.h"

namespace mk::gemm_reduce_scatter::swapped {

// The consumers'; elsewhere that of warpgroups in turns, which these tiles have not.
constexpr int STORED_BARRIER = 4;

// Of all consumer warps of the launch.
__device__ __forceinline__ int consumer_warp() {
  return static_cast<int>(threadIdx.x) / 32 * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x);
}
template <class Config>
__device__ __forceinline__ int num_consumer_warps() {
  return Config::NUM_CONSUMER_WARPS * static_cast<int>(gridDim.x);
}

__device__ __forceinline__ PartialPanels panels_of(const SwappedParams& params) {
  return {params.merged_rows.max_rows};
}

// Rounds a warp's 16 columns of some rows of the product, and gives each row to its owner, or to everyone.
struct ExchangeColumns {
  const RankLaunch& launch;
  const SwappedParams& params;

  // From column `m` and row `n` of the product on.
  template <int NUM_ACCUMULATORS>
  __device__ __forceinline__ void operator()(const float (&accumulators)[NUM_ACCUMULATORS], int m, int n,
                                             int n_end) const {
    if (!__any_sync(~0u, m < params.output.n && n < n_end)) return;
    const bool one_shot = params.reduction == Reduction::one_shot;
    const int rank = params.comm.rank;
    const int max_rows = params.merged_rows.max_rows;
    const int64_t column = rank * params.slot_bytes + panels_of(params).offset(0, m + turned_column());
    const int row = n + static_cast<int>(threadIdx.x) % 32 / 4;
    const int first_owner = one_shot ? 0 : n / params.rows_of_owner;
    const int end_owner = one_shot ? params.comm.nranks : (n_end - 1) / params.rows_of_owner + 1;
    int owner = first_in_turn(rank, first_owner, end_owner);
    uint2 fours[NUM_ACCUMULATORS / 4];
#pragma unroll 1
    for (int i = first_owner; i < end_owner; ++i) {
      const int first_row = one_shot ? 0 : owner * max_rows;
      const OwnedRows rows = {launch.area(owner, column), row - first_row,
                              (one_shot ? n_end : min(n_end, first_row + max_rows)) - first_row};
      if (i > first_owner) {
        store(rows, fours);
      } else if (params.comm_type == GemmType::bf16) {
        turn_and_store<__nv_bfloat16>(rows, accumulators, fours);
      } else {
        turn_and_store<__half>(rows, accumulators, fours);
      }
      owner = owner + 1 < end_owner ? owner + 1 : first_owner;
    }
    __syncwarp();
  }

 private:
  // Of one owner.
  struct OwnedRows {
    std::byte* first;  // where its first row is to be, from this lane's column on
    int row;           // this lane's first, and then every eighth; less than 0: not one of its
    int end;

    __device__ __forceinline__ void store(int i, const uint2& four) const {
      const int own_row = row + 8 * i;
      if (own_row >= 0 && own_row < end)
        *reinterpret_cast<uint2*>(first + int64_t{own_row} * PartialPanels::ROW_BYTES) = four;
    }
  };

  // Eight rows at a time: as store_columns_16_bit() does.
  template <class T, int NUM_FOURS>
  __device__ __forceinline__ static void turn_and_store(const OwnedRows& rows, const float (&d)[4 * NUM_FOURS],
                                                        uint2 (&fours)[NUM_FOURS]) {
#pragma unroll
    for (int i = 0; i < NUM_FOURS; ++i) {
      fours[i] = turned<T>(d + 4 * i);
      rows.store(i, fours[i]);
    }
  }
  template <int NUM_FOURS>
  __device__ __forceinline__ static void store(const OwnedRows& rows, const uint2 (&fours)[NUM_FOURS]) {
#pragma unroll
    for (int i = 0; i < NUM_FOURS; ++i) rows.store(i, fours[i]);
  }
};

__device__ __forceinline__ int tile_flag(const SwappedParams& params, int source, int tile) {
  return params.first_flag + source * params.swapped_tiles.size() + tile;
}

// Tells those who own rows of this CTA's tile, when all its consumers have stored what they have of it.
template <class Config>
__device__ __forceinline__ void raise_flags(const RankLaunch& launch, const SwappedParams& params,
                                            const TileWork& work) {
  ptx::barrier_sync(STORED_BARRIER, 32 * Config::NUM_CONSUMER_WARPS);
  const SwappedTiles& tiles = params.swapped_tiles;
  const int first_row = work.n_tile * tiles.tile_rows;
  const int row_end = min(params.m, first_row + tiles.tile_rows);
  if (work.m_tile * Config::BLOCK_M >= params.output.n || first_row >= row_end) return;
  const int flag = tile_flag(params, params.comm.rank, tiles.number(work.m_tile, work.n_tile));
  const MergedRows& rows = params.merged_rows;
  const bool one_shot = params.reduction == Reduction::one_shot;
  for (int owner = threadIdx.x; owner < params.comm.nranks; owner += 32 * Config::NUM_CONSUMER_WARPS) {
    const int begin = one_shot ? 0 : rows.first_row(owner);
    const int end = one_shot ? params.m : begin + rows.rows(owner);
    if (begin < row_end && end > first_row) launch.raise_flag(owner, flag);
  }
}

// The owner as MergedRows counts it.
__device__ __forceinline__ int own_place(const SwappedParams& params) {
  return params.reduction == Reduction::one_shot ? 0 : params.comm.rank;
}

// Waits for what all sources have of the units that this warp sums: a flag a lane, since each takes two round
// trips.
template <class Config>
__device__ __forceinline__ void wait_units(const RankLaunch& launch, const SwappedParams& params,
                                           int num_units) {
  static_assert(Config::BLOCK_M % UNIT_COLUMNS == 0);  // a unit's columns are in one tile
  const MergedRows& rows = params.merged_rows;
  const int owner = own_place(params);
  int num_flags = 1;
  for (int first = 0; first < num_flags; first += 32) {
    const int mine = first + static_cast<int>(threadIdx.x) % 32;
    bool waits = false;
    int source = 0, tile = 0;
    num_flags = 0;
    for (int number = consumer_warp(); number < num_units; number += num_consumer_warps<Config>()) {
      const MergedUnit unit = rows.unit(owner, number);
      const int first_row = unit.row_unit * MergedRows::UNIT_ROWS;
      const int row = rows.first_row(owner) + first_row;
      const int num_tiles =
          params.swapped_tiles.count(row, min(MergedRows::UNIT_ROWS, rows.rows(owner) - first_row));
      const int place = mine - num_flags;
      num_flags += num_tiles * params.comm.nranks;
      if (place < 0 || mine >= num_flags) continue;
      waits = true;
      source = place / num_tiles;
      tile = params.swapped_tiles.first(row, unit.column_unit * UNIT_COLUMNS) + place % num_tiles;
    }
    launch.wait_flags(waits, tile_flag(params, source, tile), DeviceRole::reduce, DeviceObject::partial, source,
                      tile);
  }
}

// What a lane has of a unit: rows four apart, the first of the owner's, and eight columns of each.
constexpr int LANE_ROWS = 4;
struct LaneUnit {
  int row;
  int num_rows;  // of the unit from there on
  int column;

  __device__ __forceinline__ bool has(int i) const { return 4 * i < num_rows; }
};

__device__ __forceinline__ LaneUnit lane_unit(const SwappedParams& params, int owner, int number) {
  const MergedRows& rows = params.merged_rows;
  const MergedUnit unit = rows.unit(owner, number);
  const int lane = threadIdx.x % 32;
  const int row = unit.row_unit * MergedRows::UNIT_ROWS + lane / 8;
  return {row, min(MergedRows::UNIT_ROWS - lane / 8, rows.rows(owner) - row),
          unit.column_unit * UNIT_COLUMNS + lane % 8 * PIECE_COLUMNS};
}

using PieceSums = float[LANE_ROWS][PIECE_COLUMNS];

// Partial sums of two sources, which are on their way together.
constexpr int SOURCES_TOGETHER = 2;
struct PieceChunks {
  uint4 of[SOURCES_TOGETHER][LANE_ROWS];

  __device__ __forceinline__ void load(const RankLaunch& launch, const SwappedParams& params,
                                       const LaneUnit& unit, int first_source) {
    const std::byte* const first =
        launch.area(params.comm.rank, panels_of(params).offset(unit.row, unit.column)) +
        first_source * params.slot_bytes;
#pragma unroll
    for (int s = 0; s < SOURCES_TOGETHER; ++s) {
#pragma unroll
      for (int j = 0; j < LANE_ROWS; ++j) {
        of[s][j] = make_uint4(0, 0, 0, 0);
        if (first_source + s < params.comm.nranks && unit.has(j))
          of[s][j] = __ldcg(
              reinterpret_cast<const uint4*>(first + s * params.slot_bytes + 4 * j * PartialPanels::ROW_BYTES));
      }
    }
  }

  template <class T>
  __device__ __forceinline__ void add_to(PieceSums& sums) const {
#pragma unroll
    for (int s = 0; s < SOURCES_TOGETHER; ++s) {
#pragma unroll
      for (int j = 0; j < LANE_ROWS; ++j) PartialChunk<T>::add(sums[j], of[s][j]);
    }
  }
  __device__ __forceinline__ void add_to(PieceSums& sums, GemmType type) const {
    if (type == GemmType::bf16) {
      add_to<__nv_bfloat16>(sums);
    } else {
      add_to<__half>(sums);
    }
  }
};

// A finished piece: to C, and of a two-shot also to the other ranks, which all get the same bits.
__device__ __forceinline__ void finish_piece(const RankLaunch& launch, const SwappedParams& params,
                                             bool writes_outputs, float (&sums)[PIECE_COLUMNS], int64_t row,
                                             int column) {
  const EpilogueParams& output = params.output;
  const int rank = params.comm.rank;
  const int nranks = params.comm.nranks;
  add_piece_of_bias(sums, output, column);
  if (params.reduction != Reduction::scatter) round_piece(sums, output.out_type);
  if (params.reduction == Reduction::two_shot) {
    EpilogueParams to = output;
    if (!writes_outputs) to = gathered_output(launch, params);
#pragma unroll 1
    for (int step = 1; step < nranks; ++step) {
      const int peer = rank >= step ? rank - step : rank - step + nranks;
      to.c = writes_outputs ? params.comm.outputs[peer] : launch.area(peer, params.gather_begin);
      store_piece(sums, to, row, column);
    }
  }
  add_piece_of_c(sums, output, row, column);
  store_piece(sums, output, row, column);
}

// The sums of this rank's own rows, or, one-shot, of all, by the consumer warps of all CTAs.
template <class Config>
__device__ __forceinline__ void finish_units(const RankLaunch& launch, const SwappedParams& params) {
  const MergedRows& rows = params.merged_rows;
  const int owner = own_place(params);
  const bool two_shot = params.reduction == Reduction::two_shot;
  const int num_units = rows.num_units(owner);
  const int lane = threadIdx.x % 32;
  const bool writes_outputs = two_shot && launch.writes_outputs();
  const int64_t first_row = params.reduction == Reduction::scatter ? 0 : rows.first_row(owner);
  wait_units<Config>(launch, params, num_units);
  const int stride = num_consumer_warps<Config>();
  // A unit's first chunks are on their way while the one before is finished.
  LaneUnit next{};
  PieceChunks chunks;
  if (consumer_warp() < num_units) {
    next = lane_unit(params, owner, consumer_warp());
    chunks.load(launch, params, next, 0);
  }
  for (int number = consumer_warp(); number < num_units; number += stride) {
    const Tracer tracer(params.comm.trace, TRACE_COMPUTE + threadIdx.x / 128);
    const uint64_t start = tracer.now();
    const LaneUnit unit = next;
    PieceSums sums;
#pragma unroll
    for (int i = 0; i < LANE_ROWS * PIECE_COLUMNS; ++i) sums[i / PIECE_COLUMNS][i % PIECE_COLUMNS] = 0.0f;
    chunks.add_to(sums, params.comm_type);
#pragma unroll 1
    for (int source = SOURCES_TOGETHER; source < params.comm.nranks; source += SOURCES_TOGETHER) {
      chunks.load(launch, params, unit, source);
      chunks.add_to(sums, params.comm_type);
    }
    if (number + stride < num_units) {
      next = lane_unit(params, owner, number + stride);
      chunks.load(launch, params, next, 0);
    }
    // Rolled up: straight code for all of a lane's rows takes longer to fetch than it saves.
#pragma unroll 1
    for (int j = 0; j < LANE_ROWS; ++j) {
      if (unit.has(j) && unit.column < params.output.n)
        finish_piece(launch, params, writes_outputs, sums[0], first_row + unit.row + 4 * j, unit.column);
#pragma unroll
      for (int i = PIECE_COLUMNS; i < LANE_ROWS * PIECE_COLUMNS; ++i)
        sums[i / PIECE_COLUMNS - 1][i % PIECE_COLUMNS] = sums[i / PIECE_COLUMNS][i % PIECE_COLUMNS];
    }
    tracer.record(TraceKind::reduce, start, number);
  }
  if (!two_shot || consumer_warp() >= num_units) return;
  __syncwarp();
  ptx::fence_acq_rel_sys();
  for (int peer = lane; peer < params.comm.nranks; peer += 32) {
    if (peer != params.comm.rank)
      launch.raise_flag_relaxed(
          peer, params.first_gather_flag + owner * num_consumer_warps<Config>() + consumer_warp());
  }
}

__device__ __forceinline__ int owner_after(const SwappedParams& params, int step) {
  const int owner = params.comm.rank + step;
  return owner < params.comm.nranks ? owner : owner - params.comm.nranks;
}

// Two-shot: brings the units that the same warp of each other rank has finished from the receive area to C, or
// waits until it has written them there.
template <class Config>
__device__ __forceinline__ void gather_units(const RankLaunch& launch, const SwappedParams& params) {
  const MergedRows& rows = params.merged_rows;
  const int nranks = params.comm.nranks;
  const int element_bytes = element_bytes_of(params.output.out_type);
  // A flag a lane, since each takes two round trips.
  for (int first = 1; first < nranks; first += 32) {
    const int step = first + static_cast<int>(threadIdx.x) % 32;
    const int owner = owner_after(params, step);
    const bool waits = step < nranks && consumer_warp() < rows.num_units(owner);
    launch.wait_flags(waits, params.first_gather_flag + owner * num_consumer_warps<Config>() + consumer_warp(),
                      DeviceRole::gather, DeviceObject::reduced_tile, owner, consumer_warp());
  }
  if (launch.has_open_outputs()) return;
#pragma unroll 1
  for (int step = 1; step < nranks; ++step) {
    const int owner = owner_after(params, step);
    const int num_units = rows.num_units(owner);
    for (int number = consumer_warp(); number < num_units; number += num_consumer_warps<Config>()) {
      const MergedUnit unit = rows.unit(owner, number);
      const Tracer tracer(params.comm.trace, TRACE_COMPUTE + threadIdx.x / 128);
      const uint64_t start = tracer.now();
      const int own_row = unit.row_unit * MergedRows::UNIT_ROWS;
      const int64_t row = rows.first_row(owner) + own_row;
      const int column = unit.column_unit * UNIT_COLUMNS;
      bring_rows(params.output,
                 static_cast<std::byte*>(params.output.c) + (row * params.output.ldc + column) * element_bytes,
                 launch.area(params.comm.rank,
                             params.gather_begin + row * params.gather_pitch + int64_t{column} * element_bytes),
                 params.gather_pitch, min(MergedRows::UNIT_ROWS, rows.rows(owner) - own_row),
                 min(UNIT_COLUMNS, params.output.n - column));
      tracer.record(TraceKind::copy, start, number, owner);
    }
  }
}

}  // namespace mk::gemm_reduce_scatter::swapped
