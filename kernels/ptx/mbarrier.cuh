// SPDX-License-Identifier: MIT
// mbarrier: shared-memory barriers that also count bytes (PTX ISA 9.7.13.15).
#pragma once

#include <cstdint>

namespace mk::ptx {

// Address in the shared window, as every instruction here takes it.
__device__ __forceinline__ uint32_t smem_address(const void* smem_pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(smem_pointer));
}

// PTX ISA: mbarrier.init
__device__ __forceinline__ void mbarrier_init(uint64_t* barrier, uint32_t num_arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_address(barrier)), "r"(num_arrivals)
               : "memory");
}

// PTX ISA: mbarrier.inval. Before its memory is used for anything else.
__device__ __forceinline__ void mbarrier_inval(uint64_t* barrier) {
  asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(smem_address(barrier)) : "memory");
}

// PTX ISA: membar / fence, `.mbarrier_init`. Makes the inits visible to the cluster and to TMA.
__device__ __forceinline__ void fence_mbarrier_init_release_cluster() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// PTX ISA: mbarrier.arrive
__device__ __forceinline__ void mbarrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_address(barrier)) : "memory");
}

// PTX ISA: mbarrier.arrive, `.expect_tx`
__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint64_t* barrier, uint32_t num_bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_address(barrier)),
               "r"(num_bytes)
               : "memory");
}

// PTX ISA: mbarrier.test_wait, `.parity`. Does not wait.
__device__ __forceinline__ bool mbarrier_test_wait_parity(uint64_t* barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.b32 %0, 1, 0, p;\n"
      "}"
      : "=r"(done)
      : "r"(smem_address(barrier)), "r"(parity)
      : "memory");
  return done != 0;
}

// PTX ISA: mbarrier.try_wait, `.parity`. May suspend the thread for a while; false on time-out.
__device__ __forceinline__ bool mbarrier_try_wait_parity(uint64_t* barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.b32 %0, 1, 0, p;\n"
      "}"
      : "=r"(done)
      : "r"(smem_address(barrier)), "r"(parity)
      : "memory");
  return done != 0;
}

}  // namespace mk::ptx
