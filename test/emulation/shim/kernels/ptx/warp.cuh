// SPDX-License-Identifier: MIT
// kernels/ptx/warp.cuh on the host: the time.
#pragma once

#include "shim/device_words.h"

namespace mk::ptx {

inline uint64_t globaltimer() {
  return static_cast<uint64_t>(
      std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
          .count());
}

void barrier_sync(uint32_t barrier_idx, uint32_t num_threads);  // of part of a CTA: there is none here

}  // namespace mk::ptx
