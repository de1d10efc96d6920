// SPDX-License-Identifier: MIT
#pragma once

#include <cuda.h>

#include <cstdint>

namespace mk {

// `stage_bytes` is what the boxes of the two maps put into a stage. A map of A may have boxes of fewer than
// BLOCK_M rows where m is smaller: TMA takes about 6 cycles for each row of zeros outside the map, 2 for one
// inside, which at m = 16 made a stage last three times as long. The rows left unwritten only reach
// accumulators that are not stored.
struct LoadParams {
  CUtensorMap map_a;
  CUtensorMap map_b;
  uint32_t stage_bytes;
};

}  // namespace mk
