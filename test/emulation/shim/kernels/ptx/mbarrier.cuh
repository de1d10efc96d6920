// SPDX-License-Identifier: MIT
// kernels/ptx/mbarrier.cuh on the host, where a lane's bulk copies are done when it has asked for them: the
// lanes of a warp that would wait for them meet.
#pragma once

#include "shim/device_words.h"

namespace mk::ptx {

inline void mbarrier_init(uint64_t*, uint32_t) {}
inline void mbarrier_inval(uint64_t*) {}
inline void fence_mbarrier_init_release_cluster() {}
inline void mbarrier_arrive(uint64_t*) {}
inline void mbarrier_arrive_expect_tx(uint64_t*, uint32_t) {}
inline bool mbarrier_try_wait_parity(uint64_t*, uint32_t) {
  __syncwarp();
  return true;
}

}  // namespace mk::ptx
