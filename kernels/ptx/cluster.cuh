// SPDX-License-Identifier: MIT
// Clusters: who is in one, its barrier, and the shared memories of its other CTAs.
#pragma once

#include <cstdint>

#include "kernels/ptx/mbarrier.cuh"

namespace mk::ptx {

// PTX ISA 10: special registers
__device__ __forceinline__ uint32_t cluster_ctarank() {
  uint32_t value;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(value));
  return value;
}

// PTX ISA 9.7.13.3: barrier.cluster
__device__ __forceinline__ void barrier_cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
}
__device__ __forceinline__ void barrier_cluster_wait_acquire() {
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

// PTX ISA 9.7.9.24: mapa. Where CTA `cta_rank` of the cluster has what this CTA has at `smem_address`.
__device__ __forceinline__ uint32_t mapa_shared_cluster(uint32_t smem_address, uint32_t cta_rank) {
  uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(smem_address), "r"(cta_rank));
  return address;
}

// PTX ISA: mbarrier.arrive with `.shared::cluster`: at CTA `cta_rank`'s barrier of the same place. The default
// scope, .cta, is meant: `.release.cluster` costs about 0.9 us an arrival on an H200 (a memory barrier is put
// before it), and what the arrival hands over here was read by wgmma, whose completion has been waited for.
__device__ __forceinline__ void mbarrier_arrive_shared_cluster(uint64_t* barrier, uint32_t cta_rank) {
  asm volatile(
      "mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(mapa_shared_cluster(smem_address(barrier), cta_rank))
      : "memory");
}

// PTX ISA 9.7.9.13: st.async with `.v4`. The barrier, of the CTA that is written to, is told of 16 bytes when
// they are there; who waits for it sees them.
__device__ __forceinline__ void st_async_shared_cluster_v4(uint32_t cluster_address, float4 value,
                                                           uint32_t cluster_barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
          cluster_address),
      "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w), "r"(cluster_barrier)
      : "memory");
}

}  // namespace mk::ptx
