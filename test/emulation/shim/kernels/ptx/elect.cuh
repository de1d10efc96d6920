// SPDX-License-Identifier: MIT
// kernels/ptx/elect.cuh on the host.
#pragma once

#include "shim/device_words.h"

namespace mk::ptx {

inline bool elect_one() {
  emulation::exchange(0);
  return threadIdx.x % 32 == 0;
}

}  // namespace mk::ptx
