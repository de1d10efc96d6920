// SPDX-License-Identifier: MIT
// Finished rows to the output by the copy engine: a warp leaves a piece of its rows in shared memory and goes
// on with the next, and waits for nothing but a buffer. Where C is fp32 and added to, the L2 adds, as in
// gemm_epilogue.cuh; there are the outputs, too, that no tensor map describes.
#pragma once

#include <cuda.h>

#include <utility>

#include "kernels/device/gemm_epilogue.cuh"
#include "kernels/ptx/elect.cuh"
#include "kernels/ptx/tma.cuh"

namespace mk {

// A box of the output's map: 16 rows of 128 bytes, in shared memory as swizzled_chunk<128>() has them.
constexpr int STORE_BOX_ROWS = 16;
constexpr int STORE_BOX_BYTES = 128;

// Where a warpgroup stores a tile while the other multiplies.
template <class Config>
constexpr bool CAN_STORE_BOXES = Config::BLOCK_N * 2 % STORE_BOX_BYTES == 0 && Config::PING_PONG;

template <class Out, int PIECE, int NUM_BUFFERS, int NUM_ACCUMULATORS>
__device__ __forceinline__ void store_box(const float (&accumulators)[NUM_ACCUMULATORS], const CUtensorMap* map,
                                          bool adds, EpilogueBuffers<NUM_BUFFERS>& buffers, int m, int n) {
  constexpr int COLUMNS = STORE_BOX_BYTES / sizeof(Out);
  constexpr int NUM_OTHERS = NUM_BUFFERS - 1;
  uint8_t* const rows = buffers.rows[PIECE % NUM_BUFFERS];
  ptx::cp_async_bulk_wait_group_read<NUM_OTHERS>();
  __syncwarp();
  if constexpr (sizeof(Out) == 4) {
    fill_buffer_fp32<COLUMNS>(accumulators, PIECE * COLUMNS / 2, ptx::smem_address(rows));
  } else {
    fill_buffer_16_bit<Out, COLUMNS>(accumulators, PIECE * COLUMNS / 2, ptx::smem_address(rows));
  }
  ptx::fence_proxy_async_shared_cta();
  __syncwarp();
  if (ptx::elect_one()) {
    if (sizeof(Out) == 4 && adds) {
      ptx::cp_reduce_async_bulk_tensor_2d_add_global_shared(map, rows, n + PIECE * COLUMNS, m);
    } else {
      ptx::cp_async_bulk_tensor_2d_global_shared(map, rows, n + PIECE * COLUMNS, m);
    }
    ptx::cp_async_bulk_commit_group();
  }
}

template <class Out, int NUM_BUFFERS, int NUM_ACCUMULATORS>
__device__ __forceinline__ void store_boxes(float (&accumulators)[NUM_ACCUMULATORS],
                                            const EpilogueParams& params, const CUtensorMap* map,
                                            EpilogueBuffers<NUM_BUFFERS>& buffers, int m, int m_end, int n) {
  constexpr int NUM_PIECES = 2 * NUM_ACCUMULATORS * sizeof(Out) / STORE_BOX_BYTES;
  if constexpr (sizeof(Out) == 2) {
    if (params.accumulate) {
      ptx::cp_async_bulk_wait_group_read<0>();
      __syncwarp();
      add_to_rows<Out>(accumulators, params, buffers, m, m_end, n);
    }
  }
  [&]<int... PIECES>(std::integer_sequence<int, PIECES...>) {
    (store_box<Out, PIECES>(accumulators, map, params.accumulate, buffers, m, n), ...);
  }
  (std::make_integer_sequence<int, NUM_PIECES>());
}

// As store_tile_rows(). The buffers are the copy engine's until await_stored_boxes().
template <int NUM_BUFFERS, int NUM_ACCUMULATORS>
__device__ __forceinline__ void store_tile_boxes(float (&accumulators)[NUM_ACCUMULATORS],
                                                 const EpilogueParams& params, const CUtensorMap* map,
                                                 EpilogueBuffers<NUM_BUFFERS>& buffers, int m, int m_end,
                                                 int n) {
  if (!__any_sync(~0u, m < m_end && n < params.n)) return;
  if (params.bias != nullptr) add_bias(accumulators, params, n + threadIdx.x % 4 * 2);
  if (params.out_type == GemmType::bf16) {
    store_boxes<__nv_bfloat16>(accumulators, params, map, buffers, m, m_end, n);
  } else if (params.out_type == GemmType::fp16) {
    store_boxes<__half>(accumulators, params, map, buffers, m, m_end, n);
  } else {
    store_boxes<float>(accumulators, params, map, buffers, m, m_end, n);
  }
}

// By whoever stored, before its CTA ends.
__device__ __forceinline__ void await_stored_boxes() { ptx::cp_async_bulk_wait_group_read<0>(); }

// By one thread: asks the L2 for what the output has where a tile is about to be added to it.
template <int BLOCK_M, int BLOCK_N>
__device__ __forceinline__ void prefetch_tile_boxes(const CUtensorMap* map, GemmType out_type, int m, int n) {
  const int columns = STORE_BOX_BYTES / element_bytes_of(out_type);
#pragma unroll 1
  for (int row = 0; row < BLOCK_M; row += STORE_BOX_ROWS) {
#pragma unroll 1
    for (int column = 0; column < BLOCK_N; column += columns) {
      ptx::cp_async_bulk_prefetch_tensor_2d_l2(map, n + column, m + row);
    }
  }
}

}  // namespace mk
