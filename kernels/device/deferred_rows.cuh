// SPDX-License-Identifier: MIT
// Rows of a finished tile that a warp stores while it multiplies the next: rounded, they take half the
// registers of the accumulators, and these are free at once.
#pragma once

#include "kernels/device/gemm_epilogue.cuh"

namespace mk {

// What multiply_tile() stores beside its first k-steps, a piece each: nothing.
struct NothingDeferred {
  static constexpr int NUM_PIECES = 0;
  __device__ __forceinline__ void flush() {}
};

// A warp's 16 rows of all columns of a tile: the first pieces wait in its buffers, the others in registers.
template <int BLOCK_N, int NUM_BUFFERS>
class DeferredRows {
 public:
  static constexpr int COLUMNS = BLOCK_N % 64 == 0 ? 64 : 32;
  static constexpr int NUM_PIECES = BLOCK_N / COLUMNS;

  __device__ explicit DeferredRows(EpilogueBuffers<NUM_BUFFERS>& buffers) : buffers_(buffers) {}

  // The rows, as store_tile_rows() has them. False: rows of this kind cannot wait, and nothing is kept.
  __device__ __forceinline__ bool take(const float (&accumulators)[BLOCK_N / 2], const EpilogueParams& params,
                                       int m, int m_end, int n) {
    if (params.out_type == GemmType::fp32 || params.bias != nullptr || params.accumulate ||
        !params.rows_aligned || n + BLOCK_N > params.n) {
      return false;
    }
    if (params.out_type == GemmType::bf16) {
      round<__nv_bfloat16>(accumulators);
    } else {
      round<__half>(accumulators);
    }
    const int first_row = threadIdx.x % 32 / LANES_PER_ROW;
    num_rows_ = m_end - m - first_row;
    pitch_ = params.ldc * 2;
    destination_ =
        static_cast<uint8_t*>(params.c) + (m + first_row) * pitch_ + n * 2 + threadIdx.x % LANES_PER_ROW * 16;
    return true;
  }

  template <int PIECE>
  __device__ __forceinline__ void store() {
    const int lane = threadIdx.x % 32;
    const uint32_t buffer = ptx::smem_address(buffers_.rows[PIECE % NUM_BUFFERS]);
    __syncwarp();
#pragma unroll
    for (int row = 0; row < 16; row += 32 / LANES_PER_ROW) {
      const uint4 value = ptx::ld_shared_v4(
          swizzled_chunk<ROW_BYTES>(buffer, lane / LANES_PER_ROW + row, lane % LANES_PER_ROW));
      if (row < num_rows_) *reinterpret_cast<uint4*>(destination_ + row * pitch_ + PIECE * ROW_BYTES) = value;
    }
    if constexpr (PIECE + NUM_BUFFERS < NUM_PIECES) {
      __syncwarp();
      fill<PIECE + NUM_BUFFERS>(rounded_ + PIECE * COLUMNS / 4);
    }
    if constexpr (PIECE == NUM_PIECES - 1) num_rows_ = 0;
  }

  // All that is left.
  __device__ __forceinline__ void flush() {
    if (!__any_sync(~0u, num_rows_ > 0)) return;
    [&]<int... PIECES>(std::integer_sequence<int, PIECES...>) { (store<PIECES>(), ...); }
    (std::make_integer_sequence<int, NUM_PIECES>());
    __syncwarp();
  }

 private:
  static constexpr int ROW_BYTES = COLUMNS * 2;
  static constexpr int LANES_PER_ROW = ROW_BYTES / 16;

  // A piece into its buffer.
  template <int PIECE>
  __device__ __forceinline__ void fill(const uint32_t* rounded) {
    const int lane = threadIdx.x % 32;
    const int matrix = lane / 8;
    const int row = lane % 8 + matrix % 2 * 8;
    const uint32_t buffer = ptx::smem_address(buffers_.rows[PIECE % NUM_BUFFERS]);
#pragma unroll
    for (int i = 0; i < COLUMNS / 16; ++i) {
      const uint32_t* d = rounded + 4 * i;
      ptx::stmatrix_x4(swizzled_chunk<ROW_BYTES>(buffer, row, 2 * i + matrix / 2), d[0], d[1], d[2], d[3]);
    }
  }

  template <class Out, int PIECE>
  __device__ __forceinline__ void round_piece(const float (&accumulators)[BLOCK_N / 2]) {
    constexpr int NUM = COLUMNS / 4;
    uint32_t pairs[NUM];
#pragma unroll
    for (int i = 0; i < NUM; ++i) {
      const int from = PIECE * COLUMNS / 2 + 2 * i;
      pairs[i] = pack_pair<Out>(accumulators[from], accumulators[from + 1]);
      if constexpr (PIECE >= NUM_BUFFERS) rounded_[(PIECE - NUM_BUFFERS) * NUM + i] = pairs[i];
    }
    if constexpr (PIECE < NUM_BUFFERS) fill<PIECE>(pairs);
  }

  template <class Out>
  __device__ __forceinline__ void round(const float (&accumulators)[BLOCK_N / 2]) {
    __syncwarp();
    [&]<int... PIECES>(std::integer_sequence<int, PIECES...>) { (round_piece<Out, PIECES>(accumulators), ...); }
    (std::make_integer_sequence<int, NUM_PIECES>());
  }

  EpilogueBuffers<NUM_BUFFERS>& buffers_;
  uint32_t rounded_[(NUM_PIECES - NUM_BUFFERS) * COLUMNS / 4] = {};  // the pieces that are not in the buffers
  uint8_t* destination_ = nullptr;
  int64_t pitch_ = 0;
  int num_rows_ = 0;  // from the lane's first on
};

}  // namespace mk
