// SPDX-License-Identifier: MIT
// kernels/ptx/memory.cuh on the host.
#pragma once

#include "shim/device_words.h"

namespace mk::ptx {

#define MK_EMULATED_LOAD(name, type)                               \
  inline type ld_acquire_##name(const type* address) {             \
    emulation::looks_at(address);                                  \
    return __atomic_load_n(address, __ATOMIC_ACQUIRE);             \
  }                                                                \
  inline type ld_relaxed_##name(const type* address) {             \
    emulation::looks_at(address);                                  \
    const type value = __atomic_load_n(address, __ATOMIC_RELAXED); \
    emulation::orders::after_relaxed_load(address);                \
    return value;                                                  \
  }
MK_EMULATED_LOAD(gpu, uint32_t)
MK_EMULATED_LOAD(gpu, uint64_t)
MK_EMULATED_LOAD(sys, uint32_t)
MK_EMULATED_LOAD(sys, uint64_t)
#undef MK_EMULATED_LOAD

template <class Word>
Word ld_volatile(const Word* address) {
  emulation::looks_at(address);
  return *static_cast<const volatile Word*>(address);
}

#define MK_EMULATED_STORE(name, type)                        \
  inline void st_release_##name(type* address, type value) { \
    __atomic_store_n(address, value, __ATOMIC_RELEASE);      \
    emulation::has_stored();                                 \
  }                                                          \
  inline void st_relaxed_##name(type* address, type value) { \
    emulation::orders::before_relaxed_store(address);        \
    __atomic_store_n(address, value, __ATOMIC_RELAXED);      \
    emulation::has_stored();                                 \
  }
MK_EMULATED_STORE(gpu, uint32_t)
MK_EMULATED_STORE(gpu, uint64_t)
MK_EMULATED_STORE(sys, uint32_t)
MK_EMULATED_STORE(sys, uint64_t)
#undef MK_EMULATED_STORE

inline void st_relaxed_sys_v2(uint64_t* address, uint64_t first, uint64_t second) {
  st_relaxed_sys(address, first);
  st_relaxed_sys(address + 1, second);
}
inline uint64_t atom_relaxed_gpu_add(uint64_t* address, uint64_t value) { return atomicAdd(address, value); }
inline uint32_t atom_relaxed_gpu_add(uint32_t* address, uint32_t value) { return atomicAdd(address, value); }
inline void red_relaxed_gpu_add(uint32_t* address, uint32_t value) { atomicAdd(address, value); }
inline void red_relaxed_gpu_add(float* address, float value) { *address += value; }  // each by one thread
inline void red_relaxed_gpu_add_v4(float* address, const uint4& values) {
  const uint32_t bits[] = {values.x, values.y, values.z, values.w};
  for (int i = 0; i < 4; ++i) address[i] += std::bit_cast<float>(bits[i]);
}
inline uint32_t atom_release_gpu_add(uint32_t* address, uint32_t value) {
  emulation::has_stored();
  const uint32_t before = __atomic_fetch_add(address, value, __ATOMIC_RELEASE);
  emulation::orders::after_relaxed_load(address);
  return before;
}
inline uint32_t atom_acq_rel_gpu_add(uint32_t* address, uint32_t value) {
  emulation::has_stored();
  return __atomic_fetch_add(address, value, __ATOMIC_ACQ_REL);
}
inline void red_release_gpu_add(uint32_t* address, uint32_t value) {
  emulation::has_stored();
  __atomic_fetch_add(address, value, __ATOMIC_RELEASE);
}
inline void red_gpu_max(uint64_t* address, uint64_t value, int order) {
  emulation::has_stored();
  uint64_t seen = __atomic_load_n(address, __ATOMIC_RELAXED);
  while (seen < value && !__atomic_compare_exchange_n(address, &seen, value, false, order, __ATOMIC_RELAXED)) {
  }
}
inline void red_relaxed_gpu_max(uint64_t* address, uint64_t value) {
  red_gpu_max(address, value, __ATOMIC_RELAXED);
}
inline void red_release_gpu_max(uint64_t* address, uint64_t value) {
  red_gpu_max(address, value, __ATOMIC_RELEASE);
}
inline void fence_acq_rel_gpu() { emulation::orders::fence(); }
inline void fence_acq_rel_sys() { emulation::orders::fence(); }
inline void fence_proxy_async_shared_cta() {}
inline void fence_proxy_async_global() {}

}  // namespace mk::ptx
