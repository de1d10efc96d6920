// SPDX-License-Identifier: MIT
// Changing a tensor map on the device (PTX ISA 9.7.9.27.3 tensormap.replace, 9.7.13.18
// tensormap.cp_fenceproxy, 9.7.13.4 fence.proxy.tensormap).
#pragma once

#include <cuda.h>

#include <cstdint>

#include "kernels/ptx/mbarrier.cuh"

namespace mk::ptx {

// PTX ISA: tensormap.replace, `.global_dim`: the number of rows of a map in shared memory.
__device__ __forceinline__ void tensormap_replace_global_dim_1(CUtensorMap* smem_map, uint32_t value) {
  asm volatile(
      "tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [%0], 1, %1;" ::"r"(smem_address(smem_map)),
      "r"(value)
      : "memory");
}

// PTX ISA: tensormap.replace, `.global_stride`: how far the matrices of the third dimension lie apart.
__device__ __forceinline__ void tensormap_replace_global_stride_1(CUtensorMap* smem_map, uint64_t num_bytes) {
  asm volatile(
      "tensormap.replace.tile.global_stride.shared::cta.b1024.b64 [%0], 1, %1;" ::"r"(smem_address(smem_map)),
      "l"(num_bytes)
      : "memory");
}

// PTX ISA: tensormap.cp_fenceproxy: to global memory, 128-byte aligned both; by a whole warp.
__device__ __forceinline__ void tensormap_cp_fenceproxy_release_gpu(CUtensorMap* gmem_map,
                                                                    const CUtensorMap* smem_map) {
  asm volatile(
      "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%0], [%1], "
      "128;" ::"l"(gmem_map),
      "r"(smem_address(smem_map))
      : "memory");
}

// PTX ISA: fence.proxy.tensormap, `.acquire`: before the map is used.
__device__ __forceinline__ void fence_proxy_tensormap_acquire_gpu(const CUtensorMap* gmem_map) {
  asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" ::"l"(gmem_map) : "memory");
}

}  // namespace mk::ptx
