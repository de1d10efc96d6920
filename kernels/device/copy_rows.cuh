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
  constexpr int GROUP = 4;  // loads of a lane in flight together: 2 KB a warp
  const int lane = threadIdx.x % 32;
  const int chunks_per_row = static_cast<int>(block.row_bytes / 16);
  // Short rows go several at a time.
  const int lanes_per_row = chunks_per_row <= 4 ? 4 : chunks_per_row <= 8 ? 8 : chunks_per_row <= 16 ? 16 : 32;
  const int rows_at_once = 32 / lanes_per_row;
  const int first_row = lane / lanes_per_row;
#pragma unroll 1
  for (int64_t row = first_row; row < block.rows; row += GROUP * rows_at_once) {
    const std::byte* from = block.from + row * block.from_pitch;
    std::byte* to = block.to + row * block.to_pitch;
    const int num_rows = static_cast<int>(block.rows - row);
#pragma unroll 1
    for (int chunk = lane % lanes_per_row; chunk < chunks_per_row; chunk += lanes_per_row) {
      uint4 values[GROUP];
#pragma unroll
      for (int j = 0; j < GROUP; ++j) {
        if (j * rows_at_once < num_rows)
          values[j] = reinterpret_cast<const uint4*>(from + j * rows_at_once * block.from_pitch)[chunk];
      }
#pragma unroll
      for (int j = 0; j < GROUP; ++j) {
        if (j * rows_at_once < num_rows)
          reinterpret_cast<uint4*>(to + j * rows_at_once * block.to_pitch)[chunk] = values[j];
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
