// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/device/host_device.h"
#include "kernels/device/rank_comm.h"
#include "kernels/device/tile_scheduler.h"

namespace mk {

// Of tiles that two workers share along k (LateTileSchedule), each finishes every other block of 64 rows and
// gives the other one its partial sums of the rest: in slots of the giver's staging memory with a flag each, as
// in PartialsLayout. Of one of a worker's two turns.
template <int BLOCK_M, int BLOCK_N>
struct SharedPartials {
  static constexpr int GIVEN_BLOCKS = BLOCK_M / 64 / 2;
  static constexpr int SLOTS = 2 * GIVEN_BLOCKS;
  static constexpr size_t SLOT_BYTES = size_t{64} * BLOCK_N * sizeof(float);
  static_assert(GIVEN_BLOCKS > 0 && SLOTS * SLOT_BYTES <= STAGING_BYTES);
  static constexpr int MOST_WORKERS = STAGING_FLAGS_BYTES / (SLOTS * sizeof(uint32_t));

  int half;  // of the workers
  int turn;

  MK_HOST_DEVICE bool finishes(int worker, int block) const { return block % 2 == (worker >= half ? 1 : 0); }
  MK_HOST_DEVICE int partner(int worker) const { return worker >= half ? worker - half : worker + half; }

  MK_HOST_DEVICE uint32_t* flag(void* memory, int giver, int block) const {
    return static_cast<uint32_t*>(memory) + giver * SLOTS + slot(block);
  }
  MK_HOST_DEVICE float* block(void* memory, int giver, int block) const {
    return reinterpret_cast<float*>(static_cast<std::byte*>(memory) + STAGING_FLAGS_BYTES +
                                    giver * STAGING_BYTES + slot(block) * SLOT_BYTES);
  }

 private:
  MK_HOST_DEVICE int slot(int block) const { return turn * GIVEN_BLOCKS + block / 2; }
};

}  // namespace mk
