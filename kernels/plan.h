// SPDX-License-Identifier: MIT
// What the planners of the GEMM operators share.
#pragma once

#include <algorithm>

#include "operator_call.h"
#include "protocol.h"

namespace mk {

// A rank's rows are cut into at most this many chunks: more overlap no better and cost a flag each.
inline constexpr int kMaxChunks = 64;
// Chunks of about this size saturate NVLink and a 400 Gb/s NIC.
inline constexpr int64_t kDefaultChunkBytes = 256 << 10;

// Rows of a chunk: about chunk_bytes, a multiple of tile_m, and no more than `max_chunks` in max_rows.
inline int64_t choose_chunk_rows(int64_t max_rows, int64_t row_bytes, int64_t chunk_bytes, int64_t tile_m,
                                 int max_chunks) {
  const int64_t wanted = std::max<int64_t>(1, chunk_bytes / std::max<int64_t>(1, row_bytes));
  const int64_t least = ceil_div(std::max<int64_t>(1, max_rows), max_chunks);
  return round_up(std::max(wanted, least), tile_m);
}

inline int32_t tuned(int32_t tuning, int32_t choice) { return tuning > 0 ? tuning : choice; }

}  // namespace mk
