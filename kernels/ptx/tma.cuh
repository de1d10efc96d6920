// SPDX-License-Identifier: MIT
// The bulk copy engine: tensor and plain bulk copies (PTX ISA 9.7.9.25 and 9.7.9.27).
// Multicast here is between the shared memories of one cluster, never over NVLink.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "kernels/ptx/mbarrier.cuh"

namespace mk::ptx {

// PTX ISA: prefetch, `.tensormap`
__device__ __forceinline__ void prefetch_tensormap(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// PTX ISA: cp.async.bulk.tensor, global to shared. Coordinate 0 is the contiguous dimension.
__device__ __forceinline__ void cp_async_bulk_tensor_2d_shared_global(void* smem_destination,
                                                                      const CUtensorMap* map, uint64_t* barrier,
                                                                      int coordinate0, int coordinate1) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4}], [%2];" ::"r"(smem_address(smem_destination)),
      "l"(map), "r"(smem_address(barrier)), "r"(coordinate0), "r"(coordinate1)
      : "memory");
}

// The same with `.multicast::cluster`: to the same place in each CTA of `cta_mask`, each one's barrier at that
// place being told.
__device__ __forceinline__ void cp_async_bulk_tensor_2d_shared_global_multicast(
    void* smem_destination, const CUtensorMap* map, uint64_t* barrier, int coordinate0, int coordinate1,
    uint16_t cta_mask) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(smem_address(smem_destination)),
      "l"(map), "r"(smem_address(barrier)), "r"(coordinate0), "r"(coordinate1), "h"(cta_mask)
      : "memory");
}

// The same of a tensor of three dimensions.
__device__ __forceinline__ void cp_async_bulk_tensor_3d_shared_global(void* smem_destination,
                                                                      const CUtensorMap* map, uint64_t* barrier,
                                                                      int coordinate0, int coordinate1,
                                                                      int coordinate2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(smem_address(smem_destination)),
      "l"(map), "r"(smem_address(barrier)), "r"(coordinate0), "r"(coordinate1), "r"(coordinate2)
      : "memory");
}

// The same of a tensor of four.
__device__ __forceinline__ void cp_async_bulk_tensor_4d_shared_global(void* smem_destination,
                                                                      const CUtensorMap* map, uint64_t* barrier,
                                                                      int coordinate0, int coordinate1,
                                                                      int coordinate2, int coordinate3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(smem_address(smem_destination)),
      "l"(map), "r"(smem_address(barrier)), "r"(coordinate0), "r"(coordinate1), "r"(coordinate2),
      "r"(coordinate3)
      : "memory");
}

// PTX ISA: cp.async.bulk.tensor, shared to global. What lies outside the map is not written.
__device__ __forceinline__ void cp_async_bulk_tensor_2d_global_shared(const CUtensorMap* map,
                                                                      const void* smem_source, int coordinate0,
                                                                      int coordinate1) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
               "r"(smem_address(smem_source)), "r"(coordinate0), "r"(coordinate1)
               : "memory");
}

// PTX ISA: cp.reduce.async.bulk.tensor, shared to global, `.add`, in the map's type. Each element is added at
// once, in no order among them.
__device__ __forceinline__ void cp_reduce_async_bulk_tensor_2d_add_global_shared(const CUtensorMap* map,
                                                                                 const void* smem_source,
                                                                                 int coordinate0,
                                                                                 int coordinate1) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
      "r"(smem_address(smem_source)), "r"(coordinate0), "r"(coordinate1)
      : "memory");
}

// PTX ISA: cp.async.bulk.prefetch.tensor
__device__ __forceinline__ void cp_async_bulk_prefetch_tensor_2d_l2(const CUtensorMap* map, int coordinate0,
                                                                    int coordinate1) {
  asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1, %2}];" ::"l"(map), "r"(coordinate0),
               "r"(coordinate1)
               : "memory");
}

// PTX ISA: cp.async.bulk, global to shared. Addresses and size are multiples of 16 bytes.
__device__ __forceinline__ void cp_async_bulk_shared_global(void* smem_destination, const void* gmem_source,
                                                            uint32_t num_bytes, uint64_t* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   smem_address(smem_destination)),
               "l"(gmem_source), "r"(num_bytes), "r"(smem_address(barrier))
               : "memory");
}

// PTX ISA: cp.async.bulk, shared to global.
__device__ __forceinline__ void cp_async_bulk_global_shared(void* gmem_destination, const void* smem_source,
                                                            uint32_t num_bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(gmem_destination),
               "r"(smem_address(smem_source)), "r"(num_bytes)
               : "memory");
}

// PTX ISA 9.7.9.25.4.2: cp.reduce.async.bulk, shared to global, `.add` of `.f32`. Addresses and size are
// multiples of 16 bytes; each element is added at once, in no order among them.
__device__ __forceinline__ void cp_reduce_async_bulk_add_f32_global_shared(void* gmem_destination,
                                                                           const void* smem_source,
                                                                           uint32_t num_bytes) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(gmem_destination),
      "r"(smem_address(smem_source)), "r"(num_bytes)
      : "memory");
}

// PTX ISA: cp.async.bulk.commit_group
__device__ __forceinline__ void cp_async_bulk_commit_group() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// PTX ISA: cp.async.bulk.wait_group: the writes of all but the last NUM_PENDING groups are made.
template <int NUM_PENDING>
__device__ __forceinline__ void cp_async_bulk_wait_group() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(NUM_PENDING) : "memory");
}

// PTX ISA: cp.async.bulk.wait_group, `.read`: the source may be reused, and nothing more.
template <int NUM_PENDING>
__device__ __forceinline__ void cp_async_bulk_wait_group_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(NUM_PENDING) : "memory");
}

}  // namespace mk::ptx
