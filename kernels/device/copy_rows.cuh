// SPDX-License-Identifier: MIT
// A warp's share of moving rows to a peer or inside the device, by 16-byte loads and stores.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

namespace mk {

// Rows of `row_bytes` (even) at 16-byte aligned pitches. Called by a whole warp.
struct RowBlock {
  std::byte* to;
  const std::byte* from;
  int64_t to_pitch;
  int64_t from_pitch;
  int64_t rows;
  int64_t row_bytes;
};

// Loads in flight a lane: 2 KB a warp.
constexpr int COPY_UNROLL = 4;

__device__ __forceinline__ void copy_whole_chunks(std::byte* to, const std::byte* from, int64_t num_chunks) {
  const int lane = threadIdx.x % 32;
  int64_t i = lane;
  for (; i + 32 * (COPY_UNROLL - 1) < num_chunks; i += 32 * COPY_UNROLL) {
    uint4 values[COPY_UNROLL];
#pragma unroll
    for (int j = 0; j < COPY_UNROLL; ++j) values[j] = reinterpret_cast<const uint4*>(from)[i + 32 * j];
#pragma unroll
    for (int j = 0; j < COPY_UNROLL; ++j) reinterpret_cast<uint4*>(to)[i + 32 * j] = values[j];
  }
#pragma unroll 1
  for (; i < num_chunks; i += 32) reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(from)[i];
}

// Rows too narrow to fill the loads in flight one at a time: all of them as one list of chunks.
__device__ __forceinline__ void copy_narrow_rows(const RowBlock& block, uint32_t chunks_per_row) {
  const uint32_t num_chunks = static_cast<uint32_t>(block.rows) * chunks_per_row;
#pragma unroll 1
  for (uint32_t i = threadIdx.x % 32; i < num_chunks; i += 32 * COPY_UNROLL) {
    uint4 values[COPY_UNROLL];
    uint32_t rows[COPY_UNROLL];
#pragma unroll
    for (int j = 0; j < COPY_UNROLL; ++j) {
      const uint32_t idx = i + 32 * j;
      rows[j] = idx / chunks_per_row;
      if (idx < num_chunks) {
        values[j] = reinterpret_cast<const uint4*>(block.from +
                                                   rows[j] * block.from_pitch)[idx - rows[j] * chunks_per_row];
      }
    }
#pragma unroll
    for (int j = 0; j < COPY_UNROLL; ++j) {
      const uint32_t idx = i + 32 * j;
      if (idx < num_chunks) {
        reinterpret_cast<uint4*>(block.to + rows[j] * block.to_pitch)[idx - rows[j] * chunks_per_row] =
            values[j];
      }
    }
  }
}

__device__ __forceinline__ void copy_rows(RowBlock block) {
  if (block.row_bytes % 16 == 0 && block.row_bytes == block.to_pitch && block.row_bytes == block.from_pitch) {
    block.row_bytes *= block.rows;
    block.rows = 1;
  }
  const int64_t chunks_per_row = block.row_bytes / 16;
  if (chunks_per_row < 32 * COPY_UNROLL) {
    copy_narrow_rows(block, static_cast<uint32_t>(chunks_per_row));
  } else {
    for (int64_t row = 0; row < block.rows; ++row) {
      copy_whole_chunks(block.to + row * block.to_pitch, block.from + row * block.from_pitch, chunks_per_row);
    }
  }
  if (block.row_bytes % 16 == 0) return;
  for (int64_t row = 0; row < block.rows; ++row) {
    for (int64_t at = chunks_per_row * 16 + threadIdx.x % 32 * 2; at < block.row_bytes; at += 64) {
      *reinterpret_cast<uint16_t*>(block.to + row * block.to_pitch + at) =
          *reinterpret_cast<const uint16_t*>(block.from + row * block.from_pitch + at);
    }
  }
}

}  // namespace mk
