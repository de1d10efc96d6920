// SPDX-License-Identifier: MIT
// MoE GEMM + combine: the weighted sums of this rank's tokens over the rows that have come home, in fp32 and in
// the order of the experts.
#pragma once

#include "kernels/device/gemm_epilogue.cuh"
#include "kernels/ops/moe_gemm_combine/cuda_routes.cuh"

namespace mk::moe_gemm_combine {

// 16 bytes of a row.
template <class Out>
struct Chunk {
  static constexpr int NUM_ELEMENTS = 16 / sizeof(Out);
  __device__ static void add(float (&sums)[NUM_ELEMENTS], const uint4& chunk, float weight) {
    const Out* elements = reinterpret_cast<const Out*>(&chunk);
#pragma unroll
    for (int i = 0; i < NUM_ELEMENTS; ++i) sums[i] = fmaf(weight, static_cast<float>(elements[i]), sums[i]);
  }
  __device__ static uint4 round(const float (&sums)[NUM_ELEMENTS]) {
    uint4 chunk;
    uint32_t* words = reinterpret_cast<uint32_t*>(&chunk);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (sizeof(Out) == 4) {
        words[i] = __float_as_uint(sums[i]);
      } else {
        words[i] = pack_pair<Out>(sums[2 * i], sums[2 * i + 1]);
      }
    }
    return chunk;
  }
};

// A token's rows at home, in the order of their experts: lane i has the i-th.
struct TokenRows {
  int count;
  uint32_t row;
  float weight;
};

// By a whole warp, of whose first `num_lanes` lanes each may have a row: in the order of their keys, which
// differ.
__device__ __forceinline__ TokenRows order_rows(int num_lanes, bool has_row, int key, uint32_t row,
                                                float weight) {
  const int lane = threadIdx.x % 32;
  if (!has_row) key = INT32_MAX;
  int place = 0;
#pragma unroll 1
  for (int k = 0; k < num_lanes; ++k) place += __shfl_sync(~0u, key, k) < key;
  TokenRows rows{__popc(__ballot_sync(~0u, has_row)), 0, 0};
#pragma unroll 1
  for (int i = 0; i < rows.count; ++i) {
    const int from = __ffs(__ballot_sync(~0u, has_row && place == i)) - 1;
    const uint32_t its_row = __shfl_sync(~0u, row, from & 31);
    const float its_weight = __shfl_sync(~0u, weight, from & 31);
    if (lane == i) {
      rows.row = its_row;
      rows.weight = its_weight;
    }
  }
  return rows;
}

// By a whole warp; waits for the rows. False: the launch is to end.
__device__ __forceinline__ bool find_rows(const RankLaunch& launch, const CudaParams& params,
                                          const Tables& tables, int64_t token, TokenRows* found) {
  const moe::CudaRouting& routing = params.routing;
  const int lane = threadIdx.x % 32;
  int expert = routing.experts;  // beyond all
  uint32_t slot = 0;
  float weight = 0;
  bool is_there = true;
  if (lane < routing.topk) {
    const moe::RecordItem item = routing.items[token * routing.topk + lane];
    slot = static_cast<uint32_t>(item.slot);
    if (item.expert >= 0 && item.expert < routing.experts &&
        slot < tables.home_rows[item.expert + 1] - tables.home_rows[item.expert]) {
      expert = item.expert;
      weight = params.weights[token * routing.topk + lane];
      const uint32_t block = tables.home_blocks[expert] + slot / moe::BLOCK_ROWS;
      is_there = launch.wait_flag(params.first_flag + static_cast<int>(block), DeviceRole::reduce,
                                  DeviceObject::row_block, expert / routing.experts_per_rank, block);
    }
  }
  is_there = __all_sync(~0u, is_there);
  const bool has_row = expert < routing.experts;
  const uint32_t row = has_row ? tables.home_rows[expert] + slot : 0;
  *found = order_rows(routing.topk, has_row, expert, row, weight);
  return is_there;
}

// 16 bytes for each lane of a warp: what it sums at a time.
constexpr int STRIP_CHUNKS = 32;

// Part of a row, in strips.
struct Strips {
  int begin;
  int end;
};

__device__ __forceinline__ Strips all_strips(const CudaParams& params) {
  const int num_chunks = static_cast<int>(params.layout.row_bytes / 16);
  return {0, (num_chunks + STRIP_CHUNKS - 1) / STRIP_CHUNKS};
}

// The loads of GROUP rows are in flight together.
template <class Out, int GROUP>
__device__ __forceinline__ void sum_rows(const CudaParams& params, const std::byte* home, const TokenRows& rows,
                                         const Strips& strips, std::byte* to) {
  const int num_chunks = static_cast<int>(params.layout.row_bytes / 16);
#pragma unroll 1
  for (int first = strips.begin * STRIP_CHUNKS; first < strips.end * STRIP_CHUNKS; first += STRIP_CHUNKS) {
    const int chunk = first + static_cast<int>(threadIdx.x % 32);
    float sums[Chunk<Out>::NUM_ELEMENTS] = {};
#pragma unroll 1
    for (int begin = 0; begin < rows.count; begin += GROUP) {
      uint4 values[GROUP];
#pragma unroll
      for (int j = 0; j < GROUP; ++j) {
        const uint32_t row = __shfl_sync(~0u, rows.row, (begin + j) & 31);
        if (begin + j < rows.count && chunk < num_chunks)
          values[j] =
              __ldcg(reinterpret_cast<const uint4*>(home + int64_t{row} * params.layout.row_bytes) + chunk);
      }
#pragma unroll
      for (int j = 0; j < GROUP; ++j) {
        const float weight = __shfl_sync(~0u, rows.weight, (begin + j) & 31);
        if (begin + j < rows.count) Chunk<Out>::add(sums, values[j], weight);
      }
    }
    if (chunk < num_chunks) reinterpret_cast<uint4*>(to)[chunk] = Chunk<Out>::round(sums);
  }
}

// A token's sum, or some strips of it, to the row at `to`; its rows are numbered from `rows_begin` on.
template <int GROUP>
__device__ __forceinline__ void sum_token(const CudaParams& params, const std::byte* rows_begin,
                                          const TokenRows& rows, const Strips& strips, std::byte* to) {
  if (params.products.out_type == GemmType::bf16) {
    sum_rows<__nv_bfloat16, GROUP>(params, rows_begin, rows, strips, to);
  } else if (params.products.out_type == GemmType::fp16) {
    sum_rows<__half, GROUP>(params, rows_begin, rows, strips, to);
  } else {
    sum_rows<float, GROUP>(params, rows_begin, rows, strips, to);
  }
}

// One of `num_warps`: takes this rank's tokens one by one, or parts of them where there are fewer than warps: a
// token of 7168 columns and 8 rows takes a warp 28 us, a microsecond of latency a strip. find(token, &rows)
// waits for a token's rows; false: the launch is to end.
template <int GROUP, class Find>
__device__ __forceinline__ void sum_tokens(const RankLaunch& launch, const CudaParams& params, int num_warps,
                                           Find&& find) {
  const int lane = threadIdx.x % 32;
  const std::byte* home = launch.area(params.comm.rank, params.layout.home_row(0));
  const int64_t tokens = params.routing.tokens;
  const int num_strips = all_strips(params).end;
  const bool is_few = tokens < num_warps;
  const int num_parts = is_few ? min(num_strips, num_warps / max(1, static_cast<int>(tokens))) : 1;
  const int part_strips = (num_strips + num_parts - 1) / num_parts;
  const auto take_ticket = [&] {
    return lane == 0 ? static_cast<uint32_t>(atomicAdd(&params.comm.state->gather_ticket, 1u)) : 0;
  };
  uint32_t ticket = take_ticket();
#pragma unroll 1
  while (true) {
    const uint32_t unit = __shfl_sync(~0u, ticket, 0);
    const int64_t token = unit / num_parts;
    if (token >= tokens) return;
    if (!is_few) ticket = take_ticket();  // ahead of its time; of few, it would be another warp's
    const int begin = static_cast<int>(unit % num_parts) * part_strips;
    TokenRows rows;
    if (!find(token, &rows)) return;
    const Tracer tracer(params.comm.trace, trace_track());
    const uint64_t start = tracer.now();
    sum_token<GROUP>(params, home, rows, {begin, min(begin + part_strips, num_strips)},
                     params.y + token * params.y_pitch);
    tracer.record(TraceKind::reduce, start, static_cast<uint32_t>(token));
    if (is_few) ticket = take_ticket();
  }
}

}  // namespace mk::moe_gemm_combine
