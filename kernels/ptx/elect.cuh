// SPDX-License-Identifier: MIT
#pragma once

#include <cstdint>

namespace mk::ptx {

// PTX ISA: elect.sync. By a whole warp: true for one thread of it, always the same. Which, is not said; a
// producer's spans are in a trace only because it has been the first. Of what stands under such a condition the
// compiler knows that one thread runs it. Under one on threadIdx.x it does not, and makes each TMA instruction
// a loop over the warp's threads.
__device__ __forceinline__ bool elect_one() {
  uint32_t is_elected;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "elect.sync _|p, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}"
      : "=r"(is_elected));
  return is_elected != 0;
}

}  // namespace mk::ptx
