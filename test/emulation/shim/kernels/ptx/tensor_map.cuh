// SPDX-License-Identifier: MIT
// kernels/ptx/tensor_map.cuh on the host.
#pragma once

#include "kernels/ptx/tma.cuh"

namespace mk::ptx {

template <class Change>
void change_emulated_tensor(CUtensorMap* map, Change&& change) {
  EmulatedTensor tensor;
  std::memcpy(&tensor, map, sizeof tensor);
  change(tensor);
  std::memcpy(map, &tensor, sizeof tensor);
}
inline void tensormap_replace_global_dim_1(CUtensorMap* map, uint32_t value) {
  change_emulated_tensor(map, [&](EmulatedTensor& tensor) { tensor.dims[1] = value; });
}
inline void tensormap_replace_global_stride_1(CUtensorMap* map, uint64_t num_bytes) {
  change_emulated_tensor(
      map, [&](EmulatedTensor& tensor) { tensor.stride_bytes[1] = static_cast<int64_t>(num_bytes); });
}
inline void tensormap_cp_fenceproxy_release_gpu(CUtensorMap* gmem_map, const CUtensorMap* smem_map) {
  if (threadIdx.x % 32 == 0) std::memcpy(gmem_map, smem_map, sizeof *gmem_map);
  __syncwarp();
}
inline void fence_proxy_tensormap_acquire_gpu(const CUtensorMap*) {}

}  // namespace mk::ptx
