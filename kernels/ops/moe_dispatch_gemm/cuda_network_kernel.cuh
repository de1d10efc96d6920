// SPDX-License-Identifier: MIT
// MoE dispatch + GEMM on GPUs of several nodes, as one persistent kernel. Products are those of
// cuda_kernel.cuh, but that tiles of the own node's tokens come first; what they wait for is the same. One CTA
// more has the network: it exchanges counts, puts each chunk of packets that is whole to the rail peer in its
// node, and tells of chunks that have come.
#pragma once

#include "kernels/ops/moe_dispatch_gemm/cuda_kernel.cuh"
#include "kernels/ops/moe_dispatch_gemm/cuda_network_push.cuh"
#include "kernels/ops/moe_routing/cuda_network_lists.cuh"
#include "kernels/ops/moe_routing/near_tiles.h"

namespace mk::moe_dispatch_gemm {

using NetworkTable = moe::ExpertTable<NetworkParams>;
const NetworkTable& cuda_network_kernels_bf16();
const NetworkTable& cuda_network_kernels_fp16();

constexpr int NUM_NETWORK_CTAS = 1;

template <class Config>
struct NetworkStorage : Storage<Config> {
  using Counting = moe::NetworkCountingStorage<Config::NUM_THREADS>;
  static_assert(sizeof(Counting) <= Storage<Config>::ROLE_BYTES);
  NetworkTurns network;
  TileRange near_tiles[moe::MAX_NEAR_RANGES];  // of each local expert
  __device__ TwoPasses passes() const { return {near_tiles, 0}; }
  __device__ Counting& counting() { return *reinterpret_cast<Counting*>(this->role); }
};

// Puts each chunk of packets, once it is packed.
__device__ inline void send_packets(const RankLaunch& launch, const NetworkLaunch& network,
                                    const NetworkParams& params) {
  const RankOrder& order = params.comm.order;
  const int rank = params.comm.rank;
  const int lane = threadIdx.x % 32;
  const moe::Counts counts(params.routing, launch.area(rank, 0));
  // A lane's node.
  const int peer = lane < order.num_rail_peers ? order.rail_peers[lane] : rank;
  const int node = params.nodes.node[peer];
  int64_t source = relayed_packets(params.nodes, counts, rank, params.comm.nranks);
  for (int before = 0; before < node; ++before) source += counts.node_tokens(rank, before);
  const int64_t target = peer == rank ? 0 : relayed_packets(params.nodes, counts, peer, rank);
  moe::send_lists(
      launch, network, params.comm, params.chunks, params.network.packet_bytes, order.num_rail_peers,
      {peer, counts.node_tokens(rank, node), params.network.packet(source), params.network.packet(target)},
      DeviceObject::chunk,
      [&](int to, int chunk) { return params.numbers.packed_flag(params.nodes.node[to], chunk); },
      [&](int chunk) { return params.numbers.signal(rank, chunk); });
}

// Tells those who forward of chunks that have come.
__device__ inline void receive_packets(const RankLaunch& launch, const NetworkLaunch& network,
                                       const NetworkParams& params) {
  const RankOrder& order = params.comm.order;
  const int rank = params.comm.rank;
  const int lane = threadIdx.x % 32;
  const moe::Counts counts(params.routing, launch.area(rank, 0));
  const int source = lane < order.num_relayed ? order.relayed[lane] : rank;
  const uint32_t count = counts.node_tokens(source, params.nodes.node[rank]);
  moe::receive_lists(
      launch, network, params.comm, order.num_relayed, source, params.chunks.num_chunks(count),
      DeviceObject::chunk, [&](int from, int chunk) { return params.numbers.arrived_flag(from, chunk); },
      [&](int from, int chunk) { return params.numbers.signal(from, chunk); });
}

// What is left to the CTA that has the network when the counts are known.
__device__ __forceinline__ void run_network_cta(const RankLaunch& launch, const NetworkLaunch& network,
                                                const NetworkParams& params) {
  const int warp = threadIdx.x / 32;
  if (warp == 1) send_packets(launch, network, params);
  if (warp == 2) receive_packets(launch, network, params);
  __syncthreads();
  if (warp == 0) network.wait_for_puts();
}

// By all threads of a CTA that has not the network, once it has the verdict: places of rows and tokens.
template <class Config>
__device__ __forceinline__ void place(const RankLaunch& launch, const NetworkParams& params,
                                      NetworkStorage<Config>& smem) {
  const bool goes_on = smem.decision.verdict.kind == moe::Verdict::go;
  if (goes_on) {
    const moe::CudaRouting& routing = params.routing;
    const moe::Counts counts(routing, launch.area(routing.rank, 0));
    if (threadIdx.x == 0) find_places(routing, params.nodes, counts, smem.network.places);
    for (int local = threadIdx.x; local < routing.num_experts(routing.rank); local += Config::NUM_THREADS) {
      smem.near_tiles[local] =
          moe::is_split(routing, routing.rank, params.num_split, local)
              ? moe::near_tiles(routing, params.nodes, counts, routing.first_expert(routing.rank) + local,
                                Config::BLOCK_M)
              : TileRange{0, 0};
    }
    fill_tables<Config::NUM_THREADS>(launch, params, smem.tables);
  }
  if (static_cast<int>(blockIdx.x) < params.routing.num_counting_ctas) {
    place_items<Config::NUM_THREADS>(launch, params, smem.tables, smem.counting(), goes_on);
    if (goes_on) place_leaders<Config::NUM_THREADS>(launch, params, smem.network.places, smem.counting());
  }
  if (blockIdx.x == gridDim.x - 1 - NUM_NETWORK_CTAS && params.routing.writes_record)
    begin_record<Config::NUM_THREADS>(params, smem.tables, smem.decision.verdict);
}

// The kernel, but for what a CTA that computes does: compute(launch).
template <class Config, class Compute>
__device__ __forceinline__ void run_between_nodes(const NetworkParams& params, NetworkStorage<Config>& smem,
                                                  Compute&& compute) {
  const RankLaunch launch(params.comm);
  const NetworkLaunch network(launch, params.comm);
  launch.begin_cta();
  moe::route_between_nodes(launch, network, params.comm, params.routing, params.nodes, smem.counting(),
                           smem.decision, [&](int rank, int64_t, int64_t) {
                             const moe::Counts counts(params.routing, launch.area(params.comm.rank, 0));
                             return static_cast<size_t>(params.network.bytes(
                                 relayed_packets(params.nodes, counts, rank, params.comm.nranks),
                                 packed_packets(params.nodes, counts, rank)));
                           });
  const bool goes_on = smem.decision.has_counts && smem.decision.verdict.kind == moe::Verdict::go;
  if (!moe::has_network()) {
    if (smem.decision.has_counts) place<Config>(launch, params, smem);
  } else if (!goes_on && threadIdx.x < 32) {
    network.wait_for_puts();  // before an error ends all waits
  }
  if (moe::finish_routing(launch, params.comm, params.routing, smem.decision)) {
    if (moe::has_network()) {
      run_network_cta(launch, network, params);
    } else {
      const bool pushes = static_cast<int>(blockIdx.x) >= params.num_compute_ctas;
      if (pushes) {
        run_network_push_cta<Config>(params, smem);
      } else {
        take_dealt_turns<Config>(params, smem);
      }
      if (!pushes || moe::DEALS_TILES<Config>) compute(launch);
    }
  }
  launch.end_cta();
}

template <class Config>
__global__ void __launch_bounds__(Config::NUM_THREADS, 1)
    moe_dispatch_gemm_network_kernel(const __grid_constant__ NetworkParams params) {
  extern __shared__ __align__(1024) uint8_t smem_bytes[];
  NetworkStorage<Config>& smem = *reinterpret_cast<NetworkStorage<Config>*>(smem_bytes);
  run_between_nodes<Config>(
      params, smem, [&](const RankLaunch& launch) __attribute__((always_inline)) {
        run_product_cta<Config>(launch, params, smem);
      });
}

template <GemmTile TILE, class Element, bool B_TRANSPOSED>
constexpr moe::ExpertKernel<NetworkParams> cuda_network_kernel_entry() {
  using Config = GemmConfig<TILE.block_m, TILE.block_n, TILE.ping_pong, Element, false, B_TRANSPOSED>;
  static_assert(sizeof(NetworkStorage<Config>) <= 227 * 1024);
  return {moe_dispatch_gemm_network_kernel<Config>, Config::NUM_THREADS, sizeof(NetworkStorage<Config>)};
}

template <class Element>
const NetworkTable& cuda_network_kernel_table() {
  static const NetworkTable table = []<size_t... TILES>(std::index_sequence<TILES...>) {
    return NetworkTable{{{cuda_network_kernel_entry<moe::CUDA_TILES[TILES], Element, false>(),
                          cuda_network_kernel_entry<moe::CUDA_TILES[TILES], Element, true>()}...}};
  }
  (std::make_index_sequence<moe::NUM_CUDA_TILES>());
  return table;
}

}  // namespace mk::moe_dispatch_gemm
