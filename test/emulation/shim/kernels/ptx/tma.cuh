// SPDX-License-Identifier: MIT
// kernels/ptx/tma.cuh on the host: plain bulk copies, done at once.
#pragma once

#include "kernels/ptx/mbarrier.cuh"

namespace mk::ptx {

inline void cp_async_bulk_shared_global(void* smem_destination, const void* gmem_source, uint32_t num_bytes,
                                        uint64_t*) {
  std::memcpy(smem_destination, gmem_source, num_bytes);
}
inline void cp_async_bulk_global_shared(void* gmem_destination, const void* smem_source, uint32_t num_bytes) {
  std::memcpy(gmem_destination, smem_source, num_bytes);
}
inline void prefetch_tensormap(const CUtensorMap*) {}
inline void cp_async_bulk_commit_group() {}
template <int NUM_PENDING>
void cp_async_bulk_wait_group() {}
template <int NUM_PENDING>
void cp_async_bulk_wait_group_read() {}

}  // namespace mk::ptx
