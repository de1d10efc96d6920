// SPDX-License-Identifier: MIT
// MoE GEMM + combine between nodes: where rows belong, worked out on the device from the counts of all ranks,
// and in which order the tokens are listed for other nodes.
#pragma once

#include "kernels/ops/moe_gemm_combine/cuda_routes.cuh"
#include "kernels/ops/moe_routing/cuda_network_routing.cuh"

namespace mk::moe_gemm_combine {

// One warp: scan_home() over the experts of `node` alone. Of the other nodes, a rank scans its own rows.
__device__ inline void scan_home_in_node(const NetworkParams& params, const moe::Counts& counts, Tables& tables,
                                         NetworkTables& network, int home, int node) {
  const moe::CudaRouting& routing = params.routing;
  const bool is_own_node = node == params.nodes.node[routing.rank];
  const int first = routing.first_expert(routing.rank);
  const int end = routing.first_expert(routing.rank + 1);
  const auto is_there = [&](int expert) {
    return params.nodes.node[expert / routing.experts_per_rank] == node;
  };
  const RowsAndBlocks all = scan_experts(
      routing.experts, [&](int expert) { return is_there(expert) ? counts.expert_rows(home, expert) : 0; },
      [&](int expert, uint32_t row, uint32_t block) {
        if (home == routing.rank && is_there(expert)) {
          tables.home_rows[expert] = row;
          tables.home_blocks[expert] = block;
        }
        if (expert >= first && expert < end && is_own_node) {
          tables.peer_rows[(expert - first) * routing.nranks + home] = row;
          tables.peer_blocks[(expert - first) * routing.nranks + home] = block;
        }
      });
  if (threadIdx.x % 32 != 0) return;
  if (is_own_node) {
    network.list_rows[home] = all.rows;
    network.list_blocks[home] = all.blocks;
  } else {
    network.remote_begins[node] = all.rows;
  }
}

// By all threads of a CTA.
template <int NUM_THREADS>
__device__ void fill_network_tables(const RankLaunch& launch, const NetworkParams& params, Tables& tables,
                                    NetworkTables& network) {
  const moe::CudaRouting& routing = params.routing;
  const moe::Counts counts(routing, launch.area(routing.rank, 0));
  const int own_node = params.nodes.node[routing.rank];
  if (threadIdx.x == 0) {
    fill_homes(
        routing, params.num_split, tables, [&](int home) { return params.nodes.node[home] != own_node; },
        [&](int home) { return collects(params.nodes, routing.rank, home); });
  }
  fill_experts<NUM_THREADS>(params, counts, tables);
  for (int i = threadIdx.x / 32; i < routing.nranks + params.nodes.num_nodes; i += NUM_THREADS / 32) {
    if (i < routing.nranks) {
      scan_home_in_node(params, counts, tables, network, i, own_node);
    } else if (i - routing.nranks != own_node) {
      scan_home_in_node(params, counts, tables, network, routing.rank, i - routing.nranks);
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    fill_begins(routing, params.nodes, params.comm.order, params.route_chunks, params.sum_chunks, counts,
                tables, network);
  }
  __syncthreads();
  const int num_places = routing.num_experts(routing.rank) * routing.nranks;
  for (int i = threadIdx.x; i < num_places; i += NUM_THREADS) {
    const int home = i % routing.nranks;
    if (collects(params.nodes, routing.rank, home)) {
      keep_rows(routing, counts, i / routing.nranks, home, tables);
    } else {
      tables.peer_rows[i] += network.row_begins[home];
      tables.peer_blocks[i] += network.block_begins[home];
    }
  }
  __syncthreads();
}

// Where the place of a token in its list for another node is noted: by the row of the item that leads it. Null:
// the record has no such row.
__device__ __forceinline__ uint32_t* place_note(const RankLaunch& launch, const NetworkParams& params,
                                                const moe::Counts& counts, const Tables& tables,
                                                const NetworkTables& network, int expert, int slot) {
  const int rank = params.comm.rank;
  if (static_cast<uint32_t>(slot) >= counts.expert_rows(rank, expert)) return nullptr;
  const int node = params.nodes.node[expert / params.routing.experts_per_rank];
  return reinterpret_cast<uint32_t*>(
             launch.area(rank, static_cast<size_t>(params.network.places(network.regions)))) +
         network.remote_begins[node] + tables.home_rows[expert] + slot;
}

// A counting CTA, all threads: which tokens are listed for other nodes, in their order, and where.
template <int NUM_THREADS>
__device__ void place_leaders(const RankLaunch& launch, const NetworkParams& params, const Tables& tables,
                              const NetworkTables& network, moe::NetworkCountingStorage<NUM_THREADS>& smem) {
  const moe::Counts counts(params.routing, launch.area(params.comm.rank, 0));
  auto* leaders = reinterpret_cast<uint32_t*>(
      launch.area(params.comm.rank, static_cast<size_t>(params.network.leaders(network.regions))));
  moe::place_tokens(
      params.comm, params.routing, params.nodes, smem, [&](int64_t item, int expert, uint32_t place) {
        leaders[place] = static_cast<uint32_t>(item);
        uint32_t* const note =
            place_note(launch, params, counts, tables, network, expert, params.routing.items[item].slot);
        if (note != nullptr) *note = place;
      });
}

}  // namespace mk::moe_gemm_combine
