// SPDX-License-Identifier: MIT
// The first kernel of a call: what the second needs of each row of queries, in blocks as it streams them. For
// every row lse and delta = rowsum(dO * o); rows behind a run's end, and those of lse = -inf, get +inf, so that
// their weights are zero. And nobody has had a turn yet with a block's dQ.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/ops/ring_attention_backward/cuda_params.h"
#include "kernels/ptx/grid_dependency.cuh"
#include "kernels/ptx/memory.cuh"

namespace mk::ring_attention_backward {

constexpr int ROW_SUM_WARPS = 8;         // of a CTA
constexpr int MOST_ROW_SUM_CTAS = 1024;  // about what SMs hold at a time

// The sum of products of 8 pairs of elements.
template <class Element>
__device__ __forceinline__ float dot8(const uint4& a, const uint4& b) {
  const auto* const first = reinterpret_cast<const Element*>(&a);
  const auto* const second = reinterpret_cast<const Element*>(&b);
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) sum = fmaf(static_cast<float>(first[i]), static_cast<float>(second[i]), sum);
  return sum;
}

// By all warps of a CTA, 16 lanes a row: the sums of a block of rows, of which there are `num_rows`: perhaps
// none, or too many.
template <class Element>
__device__ __forceinline__ void sum_block(const HeadRows& o, const HeadRows& d_o, int dim, int batch, int head,
                                          int first_row, int num_rows, const float* lse, float* sums) {
  constexpr int LANES = 16, ROWS = BLOCK_ROWS / (2 * ROW_SUM_WARPS);
  const int lane = threadIdx.x % LANES, first = static_cast<int>(threadIdx.x) / LANES * ROWS;
  const bool has_columns = lane * 8 < dim;
  uint4 outputs[ROWS], d_outputs[ROWS];
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    outputs[i] = d_outputs[i] = make_uint4(0, 0, 0, 0);
    if (has_columns && first + i < num_rows) {
      const int64_t row = first_row + first + i;
      outputs[i] = *reinterpret_cast<const uint4*>(o.at(batch, head, row) + lane * 16);
      d_outputs[i] = *reinterpret_cast<const uint4*>(d_o.at(batch, head, row) + lane * 16);
    }
  }
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    float sum = dot8<Element>(outputs[i], d_outputs[i]);
#pragma unroll
    for (int distance = LANES / 2; distance > 0; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);
    if (lane == 0) {
      const bool is_row = first + i < num_rows;
      const float row_lse = is_row ? lse[first + i] : -INFINITY;
      sums[first + i] = row_lse == -INFINITY ? INFINITY : row_lse;
      sums[BLOCK_ROWS + first + i] = sum;
    }
  }
}

// A CTA a block of rows at a time.
template <class Element>
__global__ void __launch_bounds__(32 * ROW_SUM_WARPS)
    row_sums_kernel(const __grid_constant__ RowSumParams params) {
  if (threadIdx.x == 0) ptx::let_next_grid_come();
  const QueryRowPlaces& places = params.places;
  const int bank = bank_of(ptx::ld_relaxed_sys(&params.state->ends.ctas[0].epoch) + 1);
  std::byte* const area = params.area + bank * params.bank_bytes;
  const int64_t of_head = int64_t{places.num_runs} * places.run_blocks;
#pragma unroll 1
  for (int64_t index = blockIdx.x; index < places.num_blocks(); index += gridDim.x) {
    const int query_head = static_cast<int>(index / of_head);
    const int run = static_cast<int>((index - query_head * of_head) / places.run_blocks);
    const int block = static_cast<int>(index - query_head * of_head) - run * places.run_blocks;
    const int batch = query_head / params.heads, head = query_head - batch * params.heads;
    const int num_rows =
        params.slices.count(params.rank, run) - block * BLOCK_ROWS;  // perhaps none, or too many
    const int first_row = params.slices.first_row(params.rank, run) + block * BLOCK_ROWS;
    auto* const sums = reinterpret_cast<float*>(area + places.offset(query_head, run, block));
    if (threadIdx.x == 0) *reinterpret_cast<uint32_t*>(area + params.query_sums.turn(index)) = 0;
    const float* const lse = params.lse + int64_t{query_head} * params.slices.rows(params.rank) + first_row;
    sum_block<Element>(params.o, params.d_o, params.dim, batch, head, first_row, num_rows, lse, sums);
  }
}

}  // namespace mk::ring_attention_backward
