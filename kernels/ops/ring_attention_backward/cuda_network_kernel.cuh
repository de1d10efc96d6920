// SPDX-License-Identifier: MIT
// Gradients of ring attention on GPUs of several nodes, as one persistent kernel behind the small one: CTAs
// that compute as inside a node, CTAs that forward keys and values, and one that has the network.
#pragma once

#include <algorithm>

#include "kernels/ops/ring_attention_backward/cuda_kernel.cuh"
#include "kernels/ops/ring_attention_backward/cuda_network.cuh"

namespace mk::ring_attention_backward {

using NetworkTable = CudaTableOf<NetworkParams>;
const NetworkTable& cuda_network_kernels_bf16();
const NetworkTable& cuda_network_kernels_fp16();

template <class Config>
__global__ void __launch_bounds__(Config::NUM_THREADS, 1)
    ring_attention_backward_network_kernel(const __grid_constant__ NetworkParams params) {
  extern __shared__ __align__(1024) uint8_t smem_bytes[];
  auto& smem = *reinterpret_cast<CudaStorage<Config>*>(smem_bytes);
  const RankLaunch launch(params.comm);
  launch.begin_cta();
  if (static_cast<int>(blockIdx.x) < params.num_compute_ctas) {
    run_compute_cta<Config>(launch, params, smem, params.num_compute_ctas, [] {});
  } else if (blockIdx.x + 1 == gridDim.x) {
    run_network_cta(launch, params);
  } else {
    ring_attention::run_forward_cta<Config>(launch, params, smem_bytes);
  }
  launch.end_cta();
}

template <class Config>
constexpr CudaKernelOf<NetworkParams> cuda_network_kernel_entry() {
  constexpr size_t NUM_BYTES =
      std::max(sizeof(CudaStorage<Config>), sizeof(ring_attention::ForwardStorage<Config>));
  static_assert(NUM_BYTES <= 227 * 1024);
  return cuda_kernel_entry<Config>(ring_attention_backward_network_kernel<Config>, NUM_BYTES);
}

template <class Element>
const NetworkTable& cuda_network_kernel_table() {
  static const NetworkTable table{
      {cuda_network_kernel_entry<NarrowConfig<Element>>(), cuda_network_kernel_entry<WideConfig<Element>>()}};
  return table;
}

}  // namespace mk::ring_attention_backward
