// SPDX-License-Identifier: MIT
// Division by a number that is known before the launch: a multiplication and a shift, where a division is
// twenty to a hundred instructions that a launch's first tile would wait for.
#pragma once

#include <cstdint>

#include "kernels/device/host_device.h"

namespace mk {

class Divisor {
 public:
  Divisor() = default;
  // `divisor`: 1 to 2^31 - 1. Of what is less than 1 nothing is divided, and 1 does as well.
  MK_HOST_DEVICE explicit Divisor(int divisor) {
    const auto value = static_cast<uint32_t>(divisor > 0 ? divisor : 1);
    while (uint64_t{1} << shift_ < value) ++shift_;
    multiplier_ = static_cast<uint32_t>(((uint64_t{1} << (31 + shift_)) + value - 1) / value);
  }

  // `number` / divisor, rounded down, of any number from 0 to 2^31 - 1: the multiplier is too large by less
  // than 2^shift_ / divisor, and so the quotient by less than 1 / divisor.
  friend MK_HOST_DEVICE int operator/(int number, const Divisor& divisor) {
    const uint64_t product = uint64_t{2 * static_cast<uint32_t>(number)} * divisor.multiplier_;
    return static_cast<int>(static_cast<uint32_t>(product >> 32) >> divisor.shift_);
  }

 private:
  uint32_t multiplier_ = 1u << 31;
  int shift_ = 0;  // the least of which 2^shift_ is not less than the divisor
};

}  // namespace mk
