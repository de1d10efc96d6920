// SPDX-License-Identifier: MIT
// MoE GEMM + combine on GPUs of several nodes, as one persistent kernel. Products and pushes are those of
// cuda_kernel.cuh, but that tiles of the own node's tokens alone come last, and that the rows of another node's
// rank go to the rank that relays for it here. A few CTAs
// add these up; one more has the network: it exchanges counts, puts routes and sums, and tells of those that
// have come.
#pragma once

#include "kernels/ops/moe_gemm_combine/cuda_kernel.cuh"
#include "kernels/ops/moe_gemm_combine/cuda_network_sums.cuh"
#include "kernels/ops/moe_routing/cuda_network_lists.cuh"
#include "kernels/ops/moe_routing/near_tiles.h"

namespace mk::moe_gemm_combine {

using NetworkTable = moe::ExpertTable<NetworkParams>;
const NetworkTable& cuda_network_kernels_bf16();
const NetworkTable& cuda_network_kernels_fp16();

constexpr int NUM_NETWORK_CTAS = 1;

template <class Config>
struct NetworkStorage : Storage<Config> {
  using Counting = moe::NetworkCountingStorage<Config::NUM_THREADS>;
  static_assert(sizeof(Counting) <= Storage<Config>::ROLE_BYTES);
  NetworkTables network;
  TileRange near_tiles[moe::MAX_NEAR_RANGES];  // of each local expert
  __device__ TwoPasses passes() const { return {near_tiles, 1}; }
  __device__ Counting& counting() { return *reinterpret_cast<Counting*>(this->role); }
};

// A warp: this rank's routes, once they are packed, to the rank that relays for it in each other node. False:
// the launch is to end.
__device__ inline bool send_routes(const RankLaunch& launch, const NetworkLaunch& network,
                                   const NetworkParams& params) {
  const RankOrder& order = params.comm.order;
  const int rank = params.comm.rank;
  const int lane = threadIdx.x % 32;
  const moe::Counts counts(params.routing, launch.area(rank, 0));
  moe::PutList mine = {rank, 0, 0, 0};
  if (lane < order.num_rail_peers) {
    const int peer = order.rail_peers[lane];
    const int node = params.nodes.node[peer];
    const Regions here = regions_of(params.routing, params.nodes, counts, rank);
    const Regions there = regions_of(params.routing, params.nodes, counts, peer);
    int64_t begin = 0;
    for (int before = 0; before < node; ++before) begin += counts.node_tokens(rank, before);
    mine = {peer, counts.node_tokens(rank, node), params.network.route_to_send(here, begin),
            params.network.route(there, moe::relayed_packets(params.nodes, counts, peer, rank))};
  }
  __syncwarp();
  return moe::send_lists(
      launch, network, params.comm, params.route_chunks, params.network.route_bytes, order.num_rail_peers, mine,
      DeviceObject::chunk,
      [&](int to, int chunk) { return params.numbers.packed(params.nodes.node[to], chunk); },
      [&](int chunk) { return params.numbers.route_signal(rank, chunk); });
}

// A warp: the sums of other nodes' tokens, once they are made, home.
__device__ inline void send_sums(const RankLaunch& launch, const NetworkLaunch& network,
                                 const NetworkParams& params) {
  const RankOrder& order = params.comm.order;
  const int rank = params.comm.rank;
  const int own_node = params.nodes.node[rank];
  const int lane = threadIdx.x % 32;
  const moe::Counts counts(params.routing, launch.area(rank, 0));
  moe::PutList mine = {rank, 0, 0, 0};
  if (lane < order.num_relayed) {
    const int home = order.relayed[lane];
    const Regions here = regions_of(params.routing, params.nodes, counts, rank);
    const Regions there = regions_of(params.routing, params.nodes, counts, home);
    const int64_t source =
        NetworkLayout::first_sum_to_send(here) + moe::relayed_packets(params.nodes, counts, rank, home);
    int64_t target = NetworkLayout::first_sum(there);
    for (int before = 0; before < own_node; ++before) target += counts.node_tokens(home, before);
    mine = {home, counts.node_tokens(home, own_node), params.network.row(source), params.network.row(target)};
  }
  __syncwarp();
  moe::send_lists(
      launch, network, params.comm, params.sum_chunks, params.network.row_bytes, order.num_relayed, mine,
      DeviceObject::partial, [&](int to, int chunk) { return params.numbers.made(to, chunk); },
      [&](int chunk) { return params.numbers.sum_signal(own_node, chunk); });
}

// A warp: tells those who sum for other nodes of routes that have come.
__device__ inline void receive_routes(const RankLaunch& launch, const NetworkLaunch& network,
                                      const NetworkParams& params) {
  const RankOrder& order = params.comm.order;
  const int rank = params.comm.rank;
  const int lane = threadIdx.x % 32;
  const moe::Counts counts(params.routing, launch.area(rank, 0));
  const int home = lane < order.num_relayed ? order.relayed[lane] : rank;
  const uint32_t count = counts.node_tokens(home, params.nodes.node[rank]);
  moe::receive_lists(
      launch, network, params.comm, order.num_relayed, home, params.route_chunks.num_chunks(count),
      DeviceObject::chunk, [&](int from, int chunk) { return params.numbers.routed(from, chunk); },
      [&](int from, int chunk) { return params.numbers.route_signal(from, chunk); });
}

// A warp: tells those who sum this rank's tokens of other nodes' sums that have come.
__device__ inline void receive_sums(const RankLaunch& launch, const NetworkLaunch& network,
                                    const NetworkParams& params) {
  const RankOrder& order = params.comm.order;
  const int rank = params.comm.rank;
  const int lane = threadIdx.x % 32;
  const moe::Counts counts(params.routing, launch.area(rank, 0));
  const int relay = lane < order.num_rail_peers ? order.rail_peers[lane] : rank;
  const uint32_t count = counts.node_tokens(rank, params.nodes.node[relay]);
  moe::receive_lists(
      launch, network, params.comm, order.num_rail_peers, relay, params.sum_chunks.num_chunks(count),
      DeviceObject::partial,
      [&](int from, int chunk) { return params.numbers.summed(params.nodes.node[from], chunk); },
      [&](int from, int chunk) { return params.numbers.sum_signal(params.nodes.node[from], chunk); });
}

// What is left to the CTA that has the network when the counts are known. Routes are packed by warps that wait
// for nobody, so they hold up no sums.
__device__ __forceinline__ void run_network_cta(const RankLaunch& launch, const NetworkLaunch& network,
                                                const NetworkParams& params) {
  const int warp = threadIdx.x / 32;
  if (warp == 0) receive_sums(launch, network, params);
  if (warp == 1 && send_routes(launch, network, params)) send_sums(launch, network, params);
  if (warp == 2) receive_routes(launch, network, params);
  __syncthreads();
  if (warp == 0) network.wait_for_puts();
}

// By all threads of a CTA that has not the network, when the launch goes on.
template <class Config>
__device__ __forceinline__ void place(const RankLaunch& launch, const NetworkParams& params,
                                      NetworkStorage<Config>& smem) {
  const moe::CudaRouting& routing = params.routing;
  const moe::Counts counts(routing, launch.area(routing.rank, 0));
  for (int local = threadIdx.x; local < routing.num_experts(routing.rank); local += Config::NUM_THREADS) {
    smem.near_tiles[local] = moe::is_split(routing, routing.rank, params.num_split, local)
                                 ? moe::near_tiles(routing, params.nodes, counts,
                                                   routing.first_expert(routing.rank) + local, Config::BLOCK_M)
                                 : TileRange{0, 0};
  }
  fill_network_tables<Config::NUM_THREADS>(launch, params, smem.tables, smem.network);
  if (static_cast<int>(blockIdx.x) < params.routing.num_counting_ctas)
    place_leaders<Config::NUM_THREADS>(launch, params, smem.tables, smem.network, smem.counting());
}

// The kernel, but for what a CTA that computes does: compute(launch).
template <class Config, class Compute>
__device__ __forceinline__ void run_between_nodes(const NetworkParams& params, NetworkStorage<Config>& smem,
                                                  Compute&& compute) {
  const RankLaunch launch(params.comm);
  const NetworkLaunch network(launch, params.comm);
  launch.begin_cta();
  moe::route_between_nodes(
      launch, network, params.comm, params.routing, params.nodes, smem.counting(), smem.decision,
      [&](int rank, int64_t, int64_t) {
        const moe::Counts counts(params.routing, launch.area(params.comm.rank, 0));
        return static_cast<size_t>(area_bytes(params.routing, params.network, params.numbers,
                                              regions_of(params.routing, params.nodes, counts, rank)));
      });
  const bool goes_on = smem.decision.has_counts && smem.decision.verdict.kind == moe::Verdict::go;
  if (!moe::has_network()) {
    if (goes_on) place<Config>(launch, params, smem);
  } else if (!goes_on && threadIdx.x < 32) {
    network.wait_for_puts();  // before an error ends all waits
  }
  if (moe::finish_routing(launch, params.comm, params.routing, smem.decision)) {
    const int cta = static_cast<int>(blockIdx.x);
    if (moe::has_network()) {
      run_network_cta(launch, network, params);
    } else if (cta >= params.num_compute_ctas + params.num_push_ctas) {
      run_relay_cta<Config::NUM_THREADS>(launch, params, smem.tables, smem.network, smem.sums());
    } else if (cta >= params.num_compute_ctas) {
      push_cta_init(smem.push());
      push_products(launch, params, smem.tables, smem.push());
    } else {
      compute(launch);
    }
  }
  launch.end_cta();
}

template <class Config>
__global__ void __launch_bounds__(Config::NUM_THREADS, 1)
    moe_gemm_combine_network_kernel(const __grid_constant__ NetworkParams params) {
  extern __shared__ __align__(1024) uint8_t smem_bytes[];
  NetworkStorage<Config>& smem = *reinterpret_cast<NetworkStorage<Config>*>(smem_bytes);
  run_between_nodes<Config>(
      params, smem, [&](const RankLaunch& launch) __attribute__((always_inline)) {
        run_product_cta<Config>(launch, params, smem, [&](auto&& buffers) {
          sum_own_tokens(launch, params, smem.tables, smem.network,
                         params.num_compute_ctas * Config::NUM_CONSUMER_WARPS, buffers);
        });
      });
}

template <GemmTile TILE, class Element, bool B_TRANSPOSED>
constexpr moe::ExpertKernel<NetworkParams> cuda_network_kernel_entry() {
  using Config = GemmConfig<TILE.block_m, TILE.block_n, TILE.ping_pong, Element, false, B_TRANSPOSED>;
  static_assert(sizeof(NetworkStorage<Config>) <= 227 * 1024);
  return {moe_gemm_combine_network_kernel<Config>, Config::NUM_THREADS, sizeof(NetworkStorage<Config>)};
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

}  // namespace mk::moe_gemm_combine
