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

// From one tile's columns to the next one's, where `num_tiles` share out `length` evenly: such a multiple, too.
MK_HOST_DEVICE constexpr int even_columns(int length, int num_tiles) {
  const int columns = shared_box_rows(length, num_tiles > 0 ? num_tiles : 1);
  return columns > 8 ? columns : 8;
}

}  // namespace mk
