// SPDX-License-Identifier: MIT
// Included before everything else: CUDA's words for code that runs on emulated warps.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstdint>
#include <cstring>

#include "../orders.h"
#include "../warps.h"

#undef __forceinline__
#define __forceinline__ inline
#undef __noinline__
#define __noinline__
#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __grid_constant__
#define __grid_constant__

#define threadIdx (::emulation::thread_idx())
#define blockIdx (::emulation::block_idx())
#define blockDim (::emulation::block_dim())
#define gridDim (::emulation::grid_dim())

using std::max;
using std::min;

template <class T>
T __shfl_sync(uint32_t, T value, int lane) {
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  const uint64_t found = emulation::exchange(bits).of[lane];
  std::memcpy(&value, &found, sizeof value);
  return value;
}
template <class T>
T __shfl_up_sync(uint32_t mask, T value, unsigned distance) {
  const unsigned lane = threadIdx.x % 32;
  return __shfl_sync(mask, value, static_cast<int>(lane < distance ? lane : lane - distance));
}
template <class T>
T __shfl_xor_sync(uint32_t mask, T value, int other) {
  return __shfl_sync(mask, value, static_cast<int>(threadIdx.x % 32) ^ other);
}
inline uint32_t __match_any_sync(uint32_t, int value) {
  const emulation::Values& all = emulation::exchange(static_cast<uint32_t>(value));
  uint32_t bits = 0;
  for (int lane = 0; lane < 32; ++lane)
    bits |= static_cast<uint32_t>(all.of[lane] == static_cast<uint32_t>(value)) << lane;
  return bits;
}
template <class Choose>
int emulated_reduction(int value, Choose&& choose) {
  const emulation::Values& all = emulation::exchange(static_cast<uint32_t>(value));
  for (const uint64_t other : all.of) value = choose(value, static_cast<int>(other));
  return value;
}
inline int __reduce_min_sync(uint32_t, int value) {
  return emulated_reduction(value, [](int a, int b) { return std::min(a, b); });
}
inline int __reduce_max_sync(uint32_t, int value) {
  return emulated_reduction(value, [](int a, int b) { return std::max(a, b); });
}
inline uint32_t __ballot_sync(uint32_t, bool value) {
  const emulation::Values& all = emulation::exchange(value ? 1 : 0);
  uint32_t bits = 0;
  for (int lane = 0; lane < 32; ++lane) bits |= static_cast<uint32_t>(all.of[lane]) << lane;
  return bits;
}
inline bool __any_sync(uint32_t mask, bool value) { return __ballot_sync(mask, value) != 0; }
inline bool __all_sync(uint32_t mask, bool value) { return __ballot_sync(mask, value) == mask; }
inline void __syncwarp() { emulation::exchange(0); }
inline void __syncthreads() { emulation::sync_cta(); }
inline void __nanosleep(unsigned) { emulation::pause(); }
inline void __threadfence_block() { emulation::orders::fence_of_cta(); }
inline int __ffs(int value) { return __builtin_ffs(value); }
inline int __popc(uint32_t value) { return std::popcount(value); }
inline float __int_as_float(int bits) { return std::bit_cast<float>(bits); }
inline float __uint_as_float(uint32_t bits) { return std::bit_cast<float>(bits); }
inline uint32_t __float_as_uint(float value) { return std::bit_cast<uint32_t>(value); }
template <class T>
T __ldcg(const T* address) {
  return *address;
}
template <class T>
void __stcg(T* address, T value) {
  *address = value;
}
inline long long clock64() { return std::chrono::steady_clock::now().time_since_epoch().count(); }

// A relaxed read-modify-write.
template <class T, class Change>
T emulated_atomic(T* address, Change&& change) {
  emulation::orders::before_relaxed_store(address);
  const T before = change();
  emulation::has_stored();
  emulation::orders::after_relaxed_load(address);
  return before;
}
template <class T, class U>
T atomicAdd(T* address, U value) {
  return emulated_atomic(address,
                         [&] { return __atomic_fetch_add(address, static_cast<T>(value), __ATOMIC_RELAXED); });
}
template <class T, class U>
T atomicExch(T* address, U value) {
  return emulated_atomic(address,
                         [&] { return __atomic_exchange_n(address, static_cast<T>(value), __ATOMIC_RELAXED); });
}
template <class T, class U, class V>
T atomicCAS(T* address, U expected, V value) {
  return emulated_atomic(address, [&] {
    T seen = static_cast<T>(expected);
    __atomic_compare_exchange_n(address, &seen, static_cast<T>(value), false, __ATOMIC_RELAXED,
                                __ATOMIC_RELAXED);
    return seen;
  });
}
template <class T, class U>
T atomicOr(T* address, U value) {
  return emulated_atomic(address,
                         [&] { return __atomic_fetch_or(address, static_cast<T>(value), __ATOMIC_RELAXED); });
}
template <class T, class U>
T atomicMax(T* address, U value) {
  return emulated_atomic(address, [&] {
    T seen = __atomic_load_n(address, __ATOMIC_RELAXED);
    while (seen < static_cast<T>(value) &&
           !__atomic_compare_exchange_n(address, &seen, static_cast<T>(value), false, __ATOMIC_RELAXED,
                                        __ATOMIC_RELAXED)) {
    }
    return seen;
  });
}
