// SPDX-License-Identifier: MIT
// Clusters: who is in one, its barrier, and the shared memories of its other CTAs.
#pragma once

#include <cstdint>

namespace mk::ptx {

// PTX ISA 10: special registers
__device__ __forceinline__ uint32_t cluster_ctarank() {
  uint32_t value;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(value));
  return value;
}

// PTX ISA 9.7.13.3: barrier.cluster
__device__ __forceinline__ void barrier_cluster_arrive_release() {
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
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

// PTX ISA 9.7.9.12: st, `.shared::cluster` and `.v4`
__device__ __forceinline__ void st_shared_cluster_v4(uint32_t cluster_address, float4 value) {
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(cluster_address), "f"(value.x),
               "f"(value.y), "f"(value.z), "f"(value.w)
               : "memory");
}

}  // namespace mk::ptx
