// SPDX-License-Identifier: MIT
// Ring attention over packed sequences on GPUs of several nodes, as one persistent kernel: CTAs and roles of
// cuda_network_kernel.cuh, that compute as cuda_packed_kernel.cuh's, behind what begin_packed() finds out.
#pragma once

#include "kernels/ops/ring_attention/cuda_packed_kernel.cuh"
#include "kernels/ops/ring_attention/cuda_packed_network.cuh"

namespace mk::ring_attention {

// What a CTA's role has: one that forwards takes the place of the attention. `rest` does not begin in the
// padding behind that, as it otherwise would, with the room so much too small.
template <class Config>
struct NetworkRoom : CudaStorage<Config, PackedBlock> {
  static constexpr size_t COMPUTE_BYTES = sizeof(CudaStorage<Config, PackedBlock>);
  static constexpr size_t FORWARD_BYTES = sizeof(ForwardStorage<Config>);
  alignas(CudaStorage<Config, PackedBlock>)
      uint8_t rest[FORWARD_BYTES > COMPUTE_BYTES ? FORWARD_BYTES - COMPUTE_BYTES : 1];
};

template <class Config>
struct PackedNetworkStorage : PackedCudaStorage<Config, PackedNetworkParams, NetworkRoom<Config>> {
  PanelNeeds needs;
};

template <class Config>
__global__ void __launch_bounds__(Config::NUM_THREADS, 1) ring_attention_packed_network_kernel(
    const __grid_constant__ PackedArguments<PackedNetworkParams> arguments) {
  extern __shared__ __align__(1024) uint8_t smem_bytes[];
  PackedNetworkStorage<Config>& smem = *reinterpret_cast<PackedNetworkStorage<Config>*>(smem_bytes);
  const RankLaunch launch(arguments.params.comm);
  launch.begin_cta();
  const bool goes_on = begin_packed(arguments, smem.packed, [&](PackedNetworkParams& params, int rows) {
    params.lse_rows = rows;
    if (arguments.heads_first) params.o_head_bytes = rows * params.o_row_bytes;
    settle_network(params, smem.needs);
  });
  const PackedNetworkParams& params = smem.packed.params;
  const int cta = static_cast<int>(blockIdx.x), num_compute_ctas = arguments.params.num_compute_ctas;
  const bool has_network = blockIdx.x + 1 == gridDim.x;
  if (!goes_on) {
    if (has_network && threadIdx.x < 32) end_without_keys(smem.packed);
  } else if (cta < num_compute_ctas) {
    if (cta >= num_compute_ctas - params.num_push_ctas)
      find_needs<Config::NUM_THREADS, false>(params, smem.needs);
    run_packed_compute_cta<Config>(launch, smem, num_compute_ctas);
  } else {
    find_needs<Config::NUM_THREADS, true>(params, smem.needs);
    if (has_network) {
      run_network_cta(RankLaunch(params.comm), params);  // whose entry has the hash
    } else {
      run_forward_cta<Config>(launch, params, smem_bytes);
    }
  }
  launch.end_cta();
}

using PackedNetworkKernel = CudaKernelOf<PackedArguments<PackedNetworkParams>>;
using PackedNetworkTable = CudaTableOf<PackedArguments<PackedNetworkParams>>;
const PackedNetworkTable& cuda_packed_network_kernels_bf16();
const PackedNetworkTable& cuda_packed_network_kernels_fp16();

template <class Config>
constexpr PackedNetworkKernel packed_network_kernel_entry() {
  using Storage = PackedNetworkStorage<Config>;
  static_assert(sizeof(Storage) <= 227 * 1024);
  static_assert(has_room_to_forward<Config, Storage>());
  return cuda_kernel_entry<Config>(ring_attention_packed_network_kernel<Config>, sizeof(Storage));
}

template <class Element>
const PackedNetworkTable& cuda_packed_network_kernel_table() {
  static const PackedNetworkTable table{{packed_network_kernel_entry<ConfigOf<0, Element>>(),
                                         packed_network_kernel_entry<ConfigOf<1, Element>>(),
                                         packed_network_kernel_entry<ConfigOf<2, Element>>()}};
  return table;
}

}  // namespace mk::ring_attention
