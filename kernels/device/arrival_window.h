// SPDX-License-Identifier: MIT
// Which of a sequence of things have come, in any order, when 32 at a time are looked for: the first that has
// not, and which of those from there on have.
#pragma once

#include <cstdint>

#include "kernels/device/host_device.h"

namespace mk {

struct ArrivalWindow {
  static constexpr int SIZE = 32;
  int first = 0;
  uint32_t arrived = 0;  // bit i: number first + i

  MK_HOST_DEVICE bool is_missing(int place) const { return (arrived >> place & 1) == 0; }
  // Bit i: number first + i has come now.
  MK_HOST_DEVICE void add(uint32_t fresh) {
    arrived |= fresh;
    while ((arrived & 1) != 0) {
      arrived >>= 1;
      ++first;
    }
  }
};

}  // namespace mk
