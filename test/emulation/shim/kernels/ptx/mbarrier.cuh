// SPDX-License-Identifier: MIT
// kernels/ptx/mbarrier.cuh on the host. Arrivals are counted, bytes are not: whoever would wait for them brings
// those that he has asked for, and the lanes of his warp meet.
#pragma once

#include "../../../bulk_copies.h"
#include "shim/device_words.h"

namespace mk::ptx {

// Shared memory has addresses of 32 bits: each stands for what is nearest to the place last asked for by the
// warp.
inline uint32_t low_bits_of(const void* pointer) {
  return static_cast<uint32_t>(reinterpret_cast<uintptr_t>(pointer));
}
inline uint32_t smem_address(const void* smem_pointer) {
  emulation::last_smem() = smem_pointer;
  return low_bits_of(smem_pointer);
}
inline std::byte* smem_pointer(uint32_t address) {
  const void* const near = emulation::last_smem();
  return static_cast<std::byte*>(const_cast<void*>(near)) + static_cast<int32_t>(address - low_bits_of(near));
}

// Phases in the low half; above them the arrivals that this one still expects, and those that each does.
constexpr uint64_t EMULATED_ARRIVAL = uint64_t{1} << 32;
// Plain writes: ThreadSanitizer sees what comes too early, or too late.
inline void mbarrier_init(uint64_t* barrier, uint32_t num_arrivals) {
  *barrier = num_arrivals * (EMULATED_ARRIVAL + (EMULATED_ARRIVAL << 16));
}
inline void mbarrier_inval(uint64_t* barrier) { *barrier = 0; }
inline void fence_mbarrier_init_release_cluster() {}
inline void mbarrier_arrive(uint64_t* barrier) {
  uint64_t before = __atomic_load_n(barrier, __ATOMIC_RELAXED), after;
  do {
    after = before - EMULATED_ARRIVAL;
    if ((after >> 32 & 0xffff) == 0) after += (before >> 48) * EMULATED_ARRIVAL + 1;
  } while (!__atomic_compare_exchange_n(barrier, &before, after, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED));
  emulation::has_stored();
}
inline void mbarrier_arrive_expect_tx(uint64_t*, uint32_t) {}
inline bool mbarrier_try_wait_parity(uint64_t* barrier, uint32_t) {
  __atomic_load_n(barrier, __ATOMIC_RELAXED);
  emulation::bulk_copies().complete_loads(barrier);
  __syncwarp();
  return true;
}

}  // namespace mk::ptx
