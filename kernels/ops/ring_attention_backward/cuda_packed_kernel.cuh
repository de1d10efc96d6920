// SPDX-License-Identifier: MIT
// Gradients of ring attention over packed sequences as one persistent kernel, behind a small one
// (cuda_packed_row_sums.cuh): as cuda_kernel.cuh, behind what begin_packed() finds out.
#pragma once

#include "kernels/ops/ring_attention/cuda_packed.cuh"
#include "kernels/ops/ring_attention_backward/cuda_kernel.cuh"
#include "kernels/ops/ring_attention_backward/cuda_packed_tiles.cuh"

namespace mk::ring_attention_backward {

template <class Config, class Params = PackedParams>
struct PackedCudaStorage : CudaStorage<Config> {
  ring_attention::PackedStorage<Params, Config::NUM_THREADS> packed;
};

// What else follows from the number of this rank's rows.
template <class Arguments, class Params>
__device__ __forceinline__ void settle_rows(const Arguments& arguments, Params& params, int rows) {
  if (!arguments.heads_first) return;
  for (HeadRows* tensor : {&params.dq, &params.dk, &params.dv}) tensor->head_bytes = rows * tensor->row_bytes;
}

using PackedArguments = ring_attention::PackedArguments<PackedParams>;

template <class Config>
__global__ void __launch_bounds__(Config::NUM_THREADS, 1)
    ring_attention_backward_packed_kernel(const __grid_constant__ PackedArguments arguments) {
  extern __shared__ __align__(1024) uint8_t smem_bytes[];
  PackedCudaStorage<Config>& smem = *reinterpret_cast<PackedCudaStorage<Config>*>(smem_bytes);
  const RankLaunch launch(arguments.params.comm);
  launch.begin_cta();
  const bool goes_on = begin_packed(arguments, smem.packed, [&](PackedParams& params, int rows) {
    settle_rows(arguments, params, rows);
    params.num_key_tiles = key_tiles_of(params).size();  // whatever heads are in turn
  });
  if (goes_on) {
    choose_heads(smem.packed);
    run_compute_cta<Config>(launch, smem.packed.params, smem, gridDim.x, [&] { greet_packed(smem.packed); });
  } else if (blockIdx.x == 0 && threadIdx.x < 32) {
    greet_packed(smem.packed);
  }
  launch.end_cta();
}

// A stage of dO less leaves room for what begin_packed() finds out.
template <class Element>
using PackedWideConfig = AttentionGradientConfig<128, 3, Element, 2>;

using PackedTable = CudaTableOf<PackedArguments>;
const PackedTable& cuda_packed_kernels_bf16();
const PackedTable& cuda_packed_kernels_fp16();

template <class Config>
constexpr CudaKernelOf<PackedArguments> packed_kernel_entry() {
  static_assert(sizeof(PackedCudaStorage<Config>) <= 227 * 1024);
  return cuda_kernel_entry<Config>(ring_attention_backward_packed_kernel<Config>,
                                   sizeof(PackedCudaStorage<Config>));
}

template <class Element>
const PackedTable& cuda_packed_kernel_table() {
  static const PackedTable table{
      {packed_kernel_entry<NarrowConfig<Element>>(), packed_kernel_entry<PackedWideConfig<Element>>()}};
  return table;
}

}  // namespace mk::ring_attention_backward
