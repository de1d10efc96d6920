// SPDX-License-Identifier: MIT
// Gradients of ring attention over packed sequences on GPUs of several nodes, as one persistent kernel behind
// the small one: CTAs and roles of cuda_network_kernel.cuh, that compute as cuda_packed_kernel.cuh's, behind
// what begin_packed() finds out.
#pragma once

#include "kernels/ops/ring_attention_backward/cuda_packed_kernel.cuh"
#include "kernels/ops/ring_attention_backward/cuda_packed_network.cuh"

namespace mk::ring_attention_backward {

// A CTA that forwards has its room where others have the attention's.
template <class Config>
struct PackedNetworkStorage : PackedCudaStorage<Config, PackedNetworkParams> {
  ring_attention::PanelNeeds needs;
};

template <class Config>
__global__ void __launch_bounds__(Config::NUM_THREADS, 1) ring_attention_backward_packed_network_kernel(
    const __grid_constant__ ring_attention::PackedArguments<PackedNetworkParams> arguments) {
  extern __shared__ __align__(1024) uint8_t smem_bytes[];
  PackedNetworkStorage<Config>& smem = *reinterpret_cast<PackedNetworkStorage<Config>*>(smem_bytes);
  const RankLaunch launch(arguments.params.comm);
  launch.begin_cta();
  const bool goes_on = begin_packed(arguments, smem.packed, [&](PackedNetworkParams& params, int rows) {
    settle_rows(arguments, params, rows);
    settle_network(params, smem.needs);
  });
  if (goes_on) choose_heads(smem.packed);
  const PackedNetworkParams& params = smem.packed.params;
  const int cta = static_cast<int>(blockIdx.x), num_compute_ctas = arguments.params.num_compute_ctas;
  const bool has_network = blockIdx.x + 1 == gridDim.x;
  if (!goes_on) {
    if (has_network && threadIdx.x < 32) end_without_keys(smem.packed);
  } else if (cta < num_compute_ctas) {
    if (cta >= num_compute_ctas - params.num_push_ctas)
      ring_attention::find_needs<Config::NUM_THREADS, false>(params, smem.needs);
    run_compute_cta<Config>(launch, params, smem, num_compute_ctas, [] {});
  } else {
    ring_attention::find_needs<Config::NUM_THREADS, true>(params, smem.needs);
    if (has_network) {
      run_network_cta(RankLaunch(params.comm), params);  // whose entry has the hash
    } else {
      ring_attention::run_forward_cta<Config>(launch, params, smem_bytes);
    }
  }
  launch.end_cta();
}

using PackedNetworkTable = CudaTableOf<ring_attention::PackedArguments<PackedNetworkParams>>;
const PackedNetworkTable& cuda_packed_network_kernels_bf16();
const PackedNetworkTable& cuda_packed_network_kernels_fp16();

template <class Config>
constexpr auto packed_network_kernel_entry() {
  using Storage = PackedNetworkStorage<Config>;
  static_assert(sizeof(Storage) <= 227 * 1024);
  static_assert(ring_attention::has_room_to_forward<Config, Storage>());
  return cuda_kernel_entry<Config>(ring_attention_backward_packed_network_kernel<Config>, sizeof(Storage));
}

template <class Element>
const PackedNetworkTable& cuda_packed_network_kernel_table() {
  static const PackedNetworkTable table{{packed_network_kernel_entry<NarrowConfig<Element>>(),
                                         packed_network_kernel_entry<PackedWideConfig<Element>>()}};
  return table;
}

}  // namespace mk::ring_attention_backward
