// SPDX-License-Identifier: MIT
// The first kernel of a call over packed sequences: as cuda_row_sums.cuh. How many rows this rank has, each CTA
// adds up from cu_seqlens; if that is wrong, nothing is to be known of rows.
#pragma once

#include "kernels/ops/ring_attention/cu_seqlens.h"
#include "kernels/ops/ring_attention_backward/cuda_packed_params.h"
#include "kernels/ops/ring_attention_backward/cuda_row_sums.cuh"

namespace mk::ring_attention_backward {

// By all threads of a CTA: this rank's rows; -1: cu_seqlens is wrong.
__device__ __forceinline__ int count_packed_rows(const PackedSlices& slices, int rank) {
  __shared__ int total;
  if (threadIdx.x == 0) total = 0;
  bool is_good = true;
  int rows = 0;
  for (int64_t at = threadIdx.x; at <= slices.num_sequences; at += 32 * ROW_SUM_WARPS) {
    const int index = static_cast<int>(at);
    is_good =
        is_good && ring_attention::is_good_entry(slices.cu_seqlens, index, slices.num_sequences, slices.seq);
    if (slices.zigzag && index < slices.num_sequences) rows += slices.share_rows(rank, index);
  }
  if (__syncthreads_and(is_good) == 0) return -1;
  if (!slices.zigzag) return slices.slice_rows_before(rank, slices.seq);
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) rows += __shfl_xor_sync(~0u, rows, distance);
  if (threadIdx.x % 32 == 0) atomicAdd(&total, rows);
  __syncthreads();
  return total;
}

// A CTA a block of rows at a time.
template <class Element>
__global__ void __launch_bounds__(32 * ROW_SUM_WARPS)
    packed_row_sums_kernel(const __grid_constant__ PackedRowSumParams params) {
  if (threadIdx.x == 0) ptx::let_next_grid_come();
  const RowSumParams& of_sums = params.sums;
  const QueryRowPlaces& places = of_sums.places;
  const int rows = count_packed_rows(params.slices, of_sums.rank);
  HeadRows o = of_sums.o, d_o = of_sums.d_o;
  if (params.heads_first) {
    o.head_bytes = rows * o.row_bytes;
    d_o.head_bytes = rows * d_o.row_bytes;
  }
  const int bank = bank_of(ptx::ld_relaxed_sys(&of_sums.state->ends.ctas[0].epoch) + 1);
  std::byte* const area = of_sums.area + bank * of_sums.bank_bytes;
#pragma unroll 1
  for (int64_t index = blockIdx.x; index < places.num_blocks(); index += gridDim.x) {
    const int head = static_cast<int>(index / places.run_blocks);
    const int block = static_cast<int>(index - int64_t{head} * places.run_blocks);
    const int first_row = block * BLOCK_ROWS, num_rows = rows - first_row;
    if (num_rows <= 0) continue;
    auto* const sums = reinterpret_cast<float*>(area + places.offset(head, 0, block));
    if (threadIdx.x == 0) *reinterpret_cast<uint32_t*>(area + of_sums.query_sums.turn(index)) = 0;
    const float* const lse = of_sums.lse + int64_t{head} * rows + first_row;
    sum_block<Element>(o, d_o, of_sums.dim, 0, head, first_row, num_rows, lse, sums);
  }
}

}  // namespace mk::ring_attention_backward
