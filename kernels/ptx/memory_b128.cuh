// SPDX-License-Identifier: MIT
// Loads and stores of 16 bytes as one (PTX ISA 9.7.9.8 ld, 9.7.9.12 st, of type `.b128`).
#pragma once

#include <cstdint>

namespace mk::ptx {

// PTX ISA: ld, `.relaxed`, and st, `.relaxed`, of `.b128`: 16 bytes, aligned, that are seen whole or not at
// all.
__device__ __forceinline__ uint4 ld_relaxed_sys_b128(const void* address) {
  uint64_t low, high;
  asm volatile(
      "{\n"
      ".reg .b128 value;\n"
      "ld.relaxed.sys.global.b128 value, [%2];\n"
      "mov.b128 {%0, %1}, value;\n"
      "}"
      : "=l"(low), "=l"(high)
      : "l"(address)
      : "memory");
  return {static_cast<uint32_t>(low), static_cast<uint32_t>(low >> 32), static_cast<uint32_t>(high),
          static_cast<uint32_t>(high >> 32)};
}
__device__ __forceinline__ void st_relaxed_sys_b128(void* address, uint4 value) {
  const uint64_t low = value.x | static_cast<uint64_t>(value.y) << 32;
  const uint64_t high = value.z | static_cast<uint64_t>(value.w) << 32;
  asm volatile(
      "{\n"
      ".reg .b128 value;\n"
      "mov.b128 value, {%1, %2};\n"
      "st.relaxed.sys.global.b128 [%0], value;\n"
      "}" ::"l"(address),
      "l"(low), "l"(high)
      : "memory");
}

}  // namespace mk::ptx
