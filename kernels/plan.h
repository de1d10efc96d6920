// SPDX-License-Identifier: MIT
// What the planners of the GEMM operators share.
#pragma once

#include <algorithm>

#include "../lib/status.h"
#include "operator_call.h"
#include "protocol.h"

namespace mk {

// A rank's rows are cut into at most this many chunks: more overlap no better and cost a flag each.
inline constexpr int kMaxChunks = 64;
// Chunks of about this size saturate NVLink and a 400 Gb/s NIC.
inline constexpr int64_t kDefaultChunkBytes = 256 << 10;

// A chunk travels in one put, which has 32 bits for its size; a finished fp32 row is twice as wide as a 16-bit
// one.
inline constexpr int64_t kMaxChunkBytes = INT32_MAX;

// Rows of a chunk: about chunk_bytes, a multiple of tile_m, and no more than `max_chunks` in max_rows.
inline Result<int32_t> choose_chunk_rows(const GemmCall& call, int64_t max_rows, int64_t row_bytes,
                                         int64_t tile_m, int max_chunks) {
  const int64_t chunk_bytes = call.tuning.chunk_bytes > 0 ? call.tuning.chunk_bytes : kDefaultChunkBytes;
  const int64_t wanted = std::max<int64_t>(1, chunk_bytes / std::max<int64_t>(1, row_bytes));
  const int64_t least = ceil_div(std::max<int64_t>(1, max_rows), max_chunks);
  const int64_t rows = round_up(std::max(std::min(wanted, max_rows), least), tile_m);
  const int64_t bytes = std::min(rows, max_rows) * round_up(row_bytes, 16);  // as it lies in the areas
  if (rows <= INT32_MAX && bytes <= kMaxChunkBytes) return static_cast<int32_t>(rows);
  return Status(
      MK_ERROR_UNSUPPORTED,
      format("mk_%s: %lld rows a rank of %lld bytes need %d transfers of %lld rows; a transfer has at "
             "most %lld bytes: use more ranks or several calls",
             operator_name(call.op), static_cast<long long>(max_rows), static_cast<long long>(row_bytes),
             max_chunks, static_cast<long long>(rows), static_cast<long long>(kMaxChunkBytes)));
}

inline int32_t tuned(int32_t tuning, int32_t choice) { return tuning > 0 ? tuning : choice; }

}  // namespace mk
