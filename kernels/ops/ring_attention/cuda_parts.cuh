// SPDX-License-Identifier: MIT
// Parts of tiles that are cut along their keys (cuda_query_items.h): their outputs in the staging memory, and
// how a tile's are joined. Each tile that is cut has a counter, to which each warp adds 1 when its rows of a
// part are there, and each time it has joined some rows of all; the last puts it back to 0.
#pragma once

#include "kernels/device/rank_comm.h"
#include "kernels/device/softmax_rows.cuh"
#include "kernels/device/trace.cuh"
#include "kernels/ops/ring_attention/cuda_query_items.h"
#include "kernels/ptx/memory.cuh"
#include "kernels/ptx/warp.cuh"

namespace mk::ring_attention {

// One number, which consumers keep through a tile: -1, or the slot and the number of the tile that is cut.
struct PartPlace {
  int packed = -1;
  __device__ __forceinline__ bool is_part() const { return packed >= 0; }
  __device__ __forceinline__ int slot() const { return packed & 0xffff; }
  __device__ __forceinline__ int cut() const { return packed >> 16; }
};
__device__ __forceinline__ PartPlace place_of(const QueryItem& item) {
  return {item.slot < 0 ? -1 : item.slot | item.cut << 16};
}

__device__ __forceinline__ uint32_t* part_counter(const RankComm& comm, int cut) {
  return reinterpret_cast<uint32_t*>(comm.partials) + cut;
}
template <class Config>
constexpr PartPlaces PART_PLACES{Config::BLOCK_M, Config::HEAD_DIM};

// A warp's 16 rows of a part; `row`: this thread's first in the tile.
template <class Config>
__device__ __forceinline__ void store_part(const RankComm& comm, const PartPlace& place, int row,
                                           const float (&outputs)[Config::HEAD_DIM / 2],
                                           const SoftmaxRows& rows) {
  constexpr PartPlaces places = PART_PLACES<Config>;
  const int lane = threadIdx.x % 4;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    auto* const to = reinterpret_cast<float2*>(comm.staging + places.outputs(place.slot(), row + 8 * i)) + lane;
#pragma unroll
    for (int j = 0; j < Config::HEAD_DIM / 8; ++j)
      __stcg(to + 4 * j, make_float2(outputs[4 * j + 2 * i], outputs[4 * j + 2 * i + 1]));
    if (lane == 0) {
      __stcg(reinterpret_cast<float2*>(comm.staging + places.weights(place.slot(), row + 8 * i)),
             make_float2(rows.maximum[i], rows.sum[i]));
    }
  }
  // The other lanes' stores come before the release of lane 0, which is cumulative.
  __syncwarp();
  if (threadIdx.x % 32 == 0) ptx::red_release_gpu_add(part_counter(comm, place.cut()), 1);
}

// Rows that a warp joins at a time.
constexpr int JOINED_ROWS = 8;
template <class Config>
constexpr int JOINS_A_TILE = Config::BLOCK_M / JOINED_ROWS;

// Without a deadline: who computes a part does not stop half-way, whatever the launch runs into.
template <class Config>
__device__ __forceinline__ void await_parts(const RankComm& comm, const QueryItem& tile) {
  const uint32_t all = static_cast<uint32_t>(tile.num_parts) * Config::NUM_CONSUMER_WARPS;
  while (ptx::ld_acquire_gpu(part_counter(comm, tile.cut)) < all) {
    __nanosleep(20);
  }
  __syncwarp();
}

// The rows from `row` on of all parts together, in the order of the parts; each lane has some columns of all of
// them. `first`: the first part of the tile.
template <class Config, class Params>
__device__ __forceinline__ void join_rows(const Params& params, const QueryItem& first, const QueryTile& tile,
                                          int row) {
  constexpr int COLUMNS = Config::HEAD_DIM / 32;
  constexpr PartPlaces places = PART_PLACES<Config>;
  struct alignas(4 * COLUMNS) Columns {
    float at[COLUMNS];
  };
  const int lane = threadIdx.x % 32;
  const std::byte* const staging = params.comm.staging;
  const auto weights_of = [&](int part) {
    return __ldcg(reinterpret_cast<const float2*>(staging + places.weights(first.slot + part, row + lane)));
  };
  // Lane i has what there is one of for row i.
  const bool has_row = lane < JOINED_ROWS;
  float maximum = -INFINITY, sum = 0;
  for (int part = 0; has_row && part < first.num_parts; ++part) maximum = fmaxf(maximum, weights_of(part).x);
  Columns joined[JOINED_ROWS] = {};
  for (int part = 0; part < first.num_parts; ++part) {
    Columns of_part[JOINED_ROWS];
#pragma unroll
    for (int i = 0; i < JOINED_ROWS; ++i) {
      const auto* const from =
          reinterpret_cast<const float*>(staging + places.outputs(first.slot + part, row + i));
      if constexpr (COLUMNS == 4) {
        const float4 four = __ldcg(reinterpret_cast<const float4*>(from) + lane);
        of_part[i] = {four.x, four.y, four.z, four.w};
      } else {
        const float2 two = __ldcg(reinterpret_cast<const float2*>(from) + lane);
        of_part[i] = {two.x, two.y};
      }
    }
    const float2 weights = has_row ? weights_of(part) : make_float2(-INFINITY, 0.0f);
    const float factor =
        weights.x == -INFINITY ? 0.0f : ptx::ex2_approx((weights.x - maximum) * params.scale_log2);
    sum += weights.y * factor;
#pragma unroll
    for (int i = 0; i < JOINED_ROWS; ++i) {
      const float of_row = __shfl_sync(~0u, factor, i);
#pragma unroll
      for (int j = 0; j < COLUMNS; ++j) joined[i].at[j] = fmaf(of_part[i].at[j], of_row, joined[i].at[j]);
    }
  }
  // A query that sees nothing, or logits of -inf only, gets zeros.
  const bool is_none = maximum == -INFINITY;
  const float factor = is_none ? 0.0f : 1.0f / sum;
  std::byte* const to = params.o + tile.batch * params.o_batch_bytes + tile.head * params.o_head_bytes;
  const int column = lane * COLUMNS;
#pragma unroll
  for (int i = 0; i < JOINED_ROWS; ++i) {
    const float of_row = __shfl_sync(~0u, factor, i);
    uint32_t words[COLUMNS / 2];
#pragma unroll
    for (int j = 0; j < COLUMNS / 2; ++j) {
      words[j] =
          pack_pair<typename Config::Element>(joined[i].at[2 * j] * of_row, joined[i].at[2 * j + 1] * of_row);
    }
    if (row + i >= tile.num_rows || column >= params.dim) continue;
    auto* const out = reinterpret_cast<uint32_t*>(to + (int64_t{tile.row} + row + i) * params.o_row_bytes) +
                      lane * (COLUMNS / 2);
    if constexpr (COLUMNS == 4) {
      *reinterpret_cast<uint2*>(out) = make_uint2(words[0], words[1]);
    } else {
      *out = words[0];
    }
  }
  if (params.lse != nullptr && has_row && row + lane < tile.num_rows) {
    const int64_t head = int64_t{tile.batch} * params.tiles.heads + tile.head;
    params.lse[head * params.lse_rows + tile.row + row + lane] = row_lse(maximum, sum, params.scale_log2);
  }
}

// Some rows are joined.
template <class Config>
__device__ __forceinline__ void end_parts(const RankComm& comm, const QueryItem& tile) {
  const uint32_t last =
      static_cast<uint32_t>(tile.num_parts) * Config::NUM_CONSUMER_WARPS + JOINS_A_TILE<Config> - 1;
  __syncwarp();
  if (threadIdx.x % 32 != 0) return;
  uint32_t* const counter = part_counter(comm, tile.cut);
  if (ptx::atom_relaxed_gpu_add(counter, 1) == last) ptx::st_relaxed_gpu(counter, 0);
}

// What is left when all is computed: by the consumer warps of `num_ctas` CTAs, some rows of a tile at a time.
template <class Config, class Params>
__device__ __forceinline__ void join_tiles(const Params& params, int warp, int num_ctas) {
  const int num_joins = params.items.num_cuts * JOINS_A_TILE<Config>;
  const Tracer tracer(params.comm.trace, TRACE_COMPUTE + warp / 4);
  for (int join = blockIdx.x + warp * num_ctas; join < num_joins;
       join += num_ctas * Config::NUM_CONSUMER_WARPS) {
    const QueryItem first = params.items.first_part(join / JOINS_A_TILE<Config>);
    tracer.begin(TraceKind::wait, first.tile);
    await_parts<Config>(params.comm, first);
    tracer.end();
    tracer.begin(TraceKind::reduce, first.tile);
    join_rows<Config>(params, first, params.tiles.at(first.tile), join % JOINS_A_TILE<Config> * JOINED_ROWS);
    end_parts<Config>(params.comm, first);
    tracer.end();
  }
}

}  // namespace mk::ring_attention
