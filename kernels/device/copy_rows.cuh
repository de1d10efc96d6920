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

// Few registers: the copy warps have given theirs to the consumers, and what they spill goes through an L1
// cache that every acquire empties.
__device__ __forceinline__ void copy_rows(const RowBlock& block) {
  constexpr int GROUP = 4;  // rows whose loads are in flight together: 2 KB a warp
  const int lane = threadIdx.x % 32;
  const int chunks_per_row = static_cast<int>(block.row_bytes / 16);
#pragma unroll 1
  for (int64_t row = 0; row < block.rows; row += GROUP) {
    const std::byte* from = block.from + row * block.from_pitch;
    std::byte* to = block.to + row * block.to_pitch;
    const int num_rows = static_cast<int>(block.rows - row);
#pragma unroll 1
    for (int chunk = lane; chunk < chunks_per_row; chunk += 32) {
      uint4 values[GROUP];
#pragma unroll
      for (int j = 0; j < GROUP; ++j) {
        if (j < num_rows) values[j] = reinterpret_cast<const uint4*>(from + j * block.from_pitch)[chunk];
      }
#pragma unroll
      for (int j = 0; j < GROUP; ++j) {
        if (j < num_rows) reinterpret_cast<uint4*>(to + j * block.to_pitch)[chunk] = values[j];
      }
    }
  }
  if (block.row_bytes % 16 == 0) return;
#pragma unroll 1
  for (int64_t row = 0; row < block.rows; ++row) {
    const int at = chunks_per_row * 16 + lane * 2;
    if (at < block.row_bytes) {
      *reinterpret_cast<uint16_t*>(block.to + row * block.to_pitch + at) =
          *reinterpret_cast<const uint16_t*>(block.from + row * block.from_pitch + at);
    }
  }
}

}  // namespace mk
