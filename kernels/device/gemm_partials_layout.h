// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/device/host_device.h"

namespace mk {

// The workspace of a launch: one partial tile and a flag for each 64 rows a CTA, and behind the flags the count
// of CtasInStep. Flags and count are zero before and after every launch (the reader clears what it has read,
// the last CTA the count), so the caller zeroes them once. They lie where no launch has partial tiles, however
// few CTAs it has: launches of all plans share a workspace, and what one of them left there is not zero.
struct PartialsLayout {
  static constexpr int MAX_BLOCKS = 4;
  static constexpr size_t FLAGS_BYTES = 4096;
  static constexpr int MAX_CTAS = FLAGS_BYTES / (MAX_BLOCKS * sizeof(uint32_t)) - 1;
  size_t block_bytes;  // of 64 rows
  size_t flags_bytes;
  size_t tile_bytes;
  size_t num_bytes;

  MK_HOST_DEVICE PartialsLayout(int num_ctas, int block_m, int block_n)
      : block_bytes(size_t{4} * 64 * block_n),
        flags_bytes(FLAGS_BYTES),
        tile_bytes(size_t{4} * block_m * block_n),
        num_bytes(flags_bytes + num_ctas * tile_bytes) {}

  MK_HOST_DEVICE uint32_t* flag(void* workspace, int cta, int block) const {
    return static_cast<uint32_t*>(workspace) + cta * MAX_BLOCKS + block;
  }
  MK_HOST_DEVICE static uint32_t* num_near(void* workspace, int num_ctas) {
    return static_cast<uint32_t*>(workspace) + num_ctas * MAX_BLOCKS;
  }
  MK_HOST_DEVICE float* block(void* workspace, int cta, int block) const {
    return reinterpret_cast<float*>(static_cast<char*>(workspace) + flags_bytes + cta * tile_bytes +
                                    block * block_bytes);
  }
};

}  // namespace mk
