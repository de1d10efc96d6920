// SPDX-License-Identifier: MIT
// Mode WGRAD on GPUs of several nodes, as one persistent kernel: rows of X travel as those of A do in mode
// FORWARD between nodes (cuda_network_kernel.cuh), and are multiplied as inside a node (cuda_wgrad.cuh), those
// of other nodes last.
#pragma once

#include "kernels/ops/allgather_gemm/cuda_network_kernel.cuh"
#include "kernels/ops/allgather_gemm/cuda_wgrad.cuh"

namespace mk::allgather_gemm {

struct NetworkWgradParams : WgradParams {};

using NetworkWgradTable = RankGemmTable<NetworkWgradParams, NUM_WGRAD_TILES>;
const NetworkWgradTable& network_wgrad_kernels_bf16();
const NetworkWgradTable& network_wgrad_kernels_fp16();

// In the order in which rows are expected.
__device__ __forceinline__ int source_at(const NetworkWgradParams& params, int position) {
  return params.comm.order.rank_at[position];
}

template <class Config>
__global__ void __launch_bounds__(Config::NUM_THREADS, 1)
    network_wgrad_kernel(const __grid_constant__ NetworkWgradParams params) {
  extern __shared__ __align__(1024) uint8_t smem_bytes[];
  WgradStorage<Config>& smem = *reinterpret_cast<WgradStorage<Config>*>(smem_bytes);
  const RankLaunch launch(params.comm);
  launch.begin_cta();
  if (static_cast<int>(blockIdx.x) >= params.tiles.num_workers) {
    run_moving_cta<Config>(launch, params, smem_bytes);
    launch.end_cta();
    return;
  }
  if (threadIdx.x == 0) wgrad_init(smem);
  __syncthreads();
  run_roles<Config>(
      params.tiles.num_workers, [&] { produce_wgrad<Config>(launch, smem, params); },
      [&](const CopyWarp& warp) {
        run_network_copy_warp(launch, params, smem.push, nullptr, warp,
                              [&] { watch_chunks<Config>(launch, params, smem.chunks); });
      },
      [&](int warpgroup) __attribute__((always_inline)) { consume_wgrad<Config>(smem, params, warpgroup); });
  launch.end_cta();
}

// dY as [m, k] is a transposed A.
template <GemmTile TILE, class Element, bool DY_TRANSPOSED>
constexpr RankGemmKernel<NetworkWgradParams> network_wgrad_kernel_entry() {
  using Config = GemmConfig<TILE.block_m, TILE.block_n, TILE.ping_pong, Element, !DY_TRANSPOSED, false>;
  static_assert(sizeof(WgradStorage<Config>) <= 227 * 1024);
  return {network_wgrad_kernel<Config>, Config::NUM_THREADS, sizeof(WgradStorage<Config>)};
}

template <class Element>
const NetworkWgradTable& network_wgrad_kernel_table() {
  static const NetworkWgradTable table = []<size_t... TILES>(std::index_sequence<TILES...>) {
    return NetworkWgradTable{{{network_wgrad_kernel_entry<WGRAD_TILES[TILES], Element, false>(),
                               network_wgrad_kernel_entry<WGRAD_TILES[TILES], Element, true>()}...}};
  }
  (std::make_index_sequence<NUM_WGRAD_TILES>());
  return table;
}

}  // namespace mk::allgather_gemm
