// SPDX-License-Identifier: MIT
// kernels/ptx/warp.cuh on the host: named barriers, what goes to shared memory, the time.
#pragma once

#include <cmath>

#include "kernels/ptx/mbarrier.cuh"

namespace mk::ptx {

inline void barrier_sync(uint32_t barrier_idx, uint32_t num_threads) {
  emulation::sync_warps(barrier_idx, num_threads / 32);
}

inline void stmatrix_x4(uint32_t smem_row_address, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
  const emulation::Values& rows = emulation::exchange(smem_row_address);
  const unsigned lane = threadIdx.x % 32;
  const uint32_t values[] = {r0, r1, r2, r3};
  for (unsigned matrix = 0; matrix < 4; ++matrix) {
    const auto row = static_cast<uint32_t>(rows.of[matrix * 8 + lane / 4]);
    std::memcpy(smem_pointer(row) + lane % 4 * 4, &values[matrix], 4);
  }
}
inline uint4 ldmatrix_x4(uint32_t smem_row_address) {
  const emulation::Values& rows = emulation::exchange(smem_row_address);
  const unsigned lane = threadIdx.x % 32;
  uint32_t values[4];
  for (unsigned matrix = 0; matrix < 4; ++matrix) {
    const auto row = static_cast<uint32_t>(rows.of[matrix * 8 + lane / 4]);
    std::memcpy(&values[matrix], smem_pointer(row) + lane % 4 * 4, 4);
  }
  return {values[0], values[1], values[2], values[3]};
}
inline uint32_t movmatrix_trans(uint32_t pair) {
  const emulation::Values& pairs = emulation::exchange(pair);
  const unsigned lane = threadIdx.x % 32;
  uint32_t transposed = 0;
  for (unsigned i = 0; i < 2; ++i) {  // of row lane / 4, column lane % 4 * 2 + i
    const unsigned row = lane % 4 * 2 + i, column = lane / 4;
    const auto found = static_cast<uint32_t>(pairs.of[row * 4 + column / 2]);
    transposed |= (found >> column % 2 * 16 & 0xffff) << i * 16;
  }
  return transposed;
}
inline void st_shared_v2(uint32_t smem_address, float x, float y) {
  const float values[] = {x, y};
  std::memcpy(smem_pointer(smem_address), values, sizeof values);
}
inline void st_shared_v4(uint32_t smem_address, const uint4& value) {
  std::memcpy(smem_pointer(smem_address), &value, sizeof value);
}
inline uint4 ld_shared_v4(uint32_t smem_address) {
  uint4 value;
  std::memcpy(&value, smem_pointer(smem_address), sizeof value);
  return value;
}

inline float ex2_approx(float x) { return std::exp2(x); }

inline uint64_t globaltimer() {
  return static_cast<uint64_t>(
      std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
          .count());
}

}  // namespace mk::ptx
