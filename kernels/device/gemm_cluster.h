// SPDX-License-Identifier: MIT
#pragma once

#include "kernels/device/host_device.h"

namespace mk {

// The tiles of CTAs of a cluster that share an operand, each of which loads a part of it for all: m neighbours
// of the same columns share B, n of the same rows A. One of the two is 1.
struct GemmCluster {
  int m = 1;
  int n = 1;
  constexpr bool operator==(const GemmCluster&) const = default;
};

// What a CTA loads of `length` rows that `num_ctas` share: a multiple of the swizzle's period. Where that does
// not divide the length, the last part overlaps the one before.
MK_HOST_DEVICE constexpr int shared_box_rows(int length, int num_ctas) {
  return (length + 8 * num_ctas - 1) / (8 * num_ctas) * 8;
}

}  // namespace mk
