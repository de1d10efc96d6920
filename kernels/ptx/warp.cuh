// SPDX-License-Identifier: MIT
// Register budgets, named barriers, matrix stores, special registers.
#pragma once

#include <cstdint>

#include "kernels/ptx/mbarrier.cuh"

namespace mk::ptx {

// PTX ISA 9.7.19.5: setmaxnreg. A multiple of 8; every warp of the warpgroup executes it.
template <int NUM_REGISTERS>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(NUM_REGISTERS));
}
template <int NUM_REGISTERS>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(NUM_REGISTERS));
}

// PTX ISA 9.7.13.1: barrier.sync. Barrier 0 is __syncthreads.
__device__ __forceinline__ void barrier_sync(uint32_t barrier_idx, uint32_t num_threads) {
  asm volatile("barrier.sync %0, %1;" ::"r"(barrier_idx), "r"(num_threads) : "memory");
}

// PTX ISA 9.7.13.1: barrier.arrive. `num_threads` counts those who arrive and those who wait.
__device__ __forceinline__ void barrier_arrive(uint32_t barrier_idx, uint32_t num_threads) {
  asm volatile("barrier.arrive %0, %1;" ::"r"(barrier_idx), "r"(num_threads) : "memory");
}

// PTX ISA 9.7.14.5.16: stmatrix. Lane i gives the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ void stmatrix_x4(uint32_t smem_row_address, uint32_t r0, uint32_t r1, uint32_t r2,
                                            uint32_t r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(smem_row_address),
               "r"(r0), "r"(r1), "r"(r2), "r"(r3)
               : "memory");
}

// PTX ISA 9.7.14.5.15: ldmatrix. As stmatrix_x4.
__device__ __forceinline__ uint4 ldmatrix_x4(uint32_t smem_row_address) {
  uint4 r;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
               : "r"(smem_row_address)
               : "memory");
  return r;
}

// PTX ISA 9.7.14.5.17: movmatrix. Lane i has two elements of row i / 4 of an 8 x 8 matrix, and gets two of its
// transpose's.
__device__ __forceinline__ uint32_t movmatrix_trans(uint32_t pair) {
  uint32_t transposed;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(pair));
  return transposed;
}

// PTX ISA 9.7.9.12: st, `.shared`, of `.v2` and `.v4`
__device__ __forceinline__ void st_shared_v2(uint32_t smem_address, float x, float y) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(smem_address), "f"(x), "f"(y) : "memory");
}
__device__ __forceinline__ void st_shared_v4(uint32_t smem_address, const uint4& value) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(smem_address), "r"(value.x), "r"(value.y),
               "r"(value.z), "r"(value.w)
               : "memory");
}

// PTX ISA 9.7.9.8: ld, `.shared` and `.v4`
__device__ __forceinline__ uint4 ld_shared_v4(uint32_t smem_address) {
  uint4 value;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(smem_address)
               : "memory");
  return value;
}

// PTX ISA 9.7.3.22: ex2, `.approx` and `.ftz`: 2 to the power x, 0 for -inf.
__device__ __forceinline__ float ex2_approx(float x) {
  float value;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(value) : "f"(x));
  return value;
}

// PTX ISA 10: special registers
__device__ __forceinline__ uint64_t globaltimer() {
  uint64_t value;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(value)::"memory");
  return value;
}

}  // namespace mk::ptx
