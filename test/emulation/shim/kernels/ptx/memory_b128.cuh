// SPDX-License-Identifier: MIT
// kernels/ptx/memory_b128.cuh on the host: whoever sees the last word sees the others.
#pragma once

#include "kernels/ptx/memory.cuh"

namespace mk::ptx {

inline uint4 ld_relaxed_sys_b128(const void* address) {
  const auto* words = static_cast<const uint64_t*>(address);
  const uint64_t high = ld_acquire_sys(words + 1), low = ld_relaxed_sys(words);
  return {static_cast<uint32_t>(low), static_cast<uint32_t>(low >> 32), static_cast<uint32_t>(high),
          static_cast<uint32_t>(high >> 32)};
}
inline void st_relaxed_sys_b128(void* address, uint4 value) {
  auto* words = static_cast<uint64_t*>(address);
  st_relaxed_sys(words, value.x | static_cast<uint64_t>(value.y) << 32);
  st_release_sys(words + 1, value.z | static_cast<uint64_t>(value.w) << 32);
}

}  // namespace mk::ptx
