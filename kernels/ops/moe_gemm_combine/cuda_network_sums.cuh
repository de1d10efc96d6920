// SPDX-License-Identifier: MIT
// MoE GEMM + combine between nodes: the CTAs that send this rank's routes to the relays and then, as relay, add
// up the rows of other nodes' tokens; and the sums of this rank's own tokens, node by node.
#pragma once

#include "kernels/ops/moe_gemm_combine/cuda_network_routes.cuh"
#include "kernels/ops/moe_gemm_combine/cuda_sums.cuh"

namespace mk::moe_gemm_combine {

// One of the warps that deal out units among themselves; neighbours are in different CTAs.
struct RelayWarp {
  uint32_t index;
  uint32_t count;
};
__device__ __forceinline__ RelayWarp relay_warp(const NetworkParams& params) {
  const int cta = static_cast<int>(blockIdx.x) - params.num_compute_ctas - params.num_push_ctas;
  return {threadIdx.x / 32 * params.num_relay_ctas + cta, blockDim.x / 32 * params.num_relay_ctas};
}

// By a whole warp whose stores of a unit are made: counts it, and raises the flag of the same number here with
// the last of those expected. All of it stays on this GPU, until the CTA that has the network releases it to
// the system with its post.
__device__ __forceinline__ void count_unit(const RankLaunch& launch, const RankComm& comm, int number,
                                           uint32_t expected) {
  ptx::fence_acq_rel_gpu();
  __syncwarp();
  if (threadIdx.x % 32 == 0) {
    uint32_t* const count = &comm.state->counts[number];
    if (atomicAdd(count, 1u) + 1 == expected) {
      ptx::st_relaxed_gpu(count, 0);
      ptx::fence_acq_rel_gpu();
      launch.raise_flag_relaxed(comm.rank, number);
    }
  }
  __syncwarp();
}

// The routes of `num` tokens for `node`, listed from `first` on; a lane below `num` has an item of its token.
__device__ __forceinline__ void write_routes(const RankLaunch& launch, const NetworkParams& params,
                                             const moe::Counts& counts, const Tables& tables,
                                             const NetworkTables& network, int node, uint32_t first, int num,
                                             uint32_t item) {
  const moe::CudaRouting& routing = params.routing;
  const int lane = threadIdx.x % 32;
  auto* const routes = reinterpret_cast<int4*>(
      launch.area(params.comm.rank, static_cast<size_t>(params.network.route_to_send(network.regions, first))));
#pragma unroll 1
  for (int begin = 0; begin < num * routing.topk; begin += 32) {
    const int index = (begin + lane) / routing.topk;
    const int k = begin + lane - index * routing.topk;
    const uint32_t token = __shfl_sync(~0u, item, index & 31) / static_cast<uint32_t>(routing.topk);
    if (index >= num) continue;
    const int64_t from = int64_t{token} * routing.topk + k;
    const moe::RecordItem its = routing.items[from];
    SumRoute route{-1, 0, 0, 0.0f};
    if (its.expert >= 0 && its.expert < routing.experts &&
        params.nodes.node[its.expert / routing.experts_per_rank] == node &&
        static_cast<uint32_t>(its.slot) < counts.expert_rows(routing.rank, its.expert)) {
      route = {its.expert, static_cast<uint32_t>(its.slot), 0, params.weights[from]};
      if (!params.nodes.relays(its.expert / routing.experts_per_rank, routing.rank)) {
        route.row += tables.home_rows[its.expert];
        route.block = tables.home_blocks[its.expert] + static_cast<uint32_t>(its.slot) / moe::BLOCK_ROWS;
      }
    }
    routes[begin + lane] = *reinterpret_cast<const int4*>(&route);
  }
}

// Where the tokens go that other nodes add up, to where the network takes them. Waits for nobody.
__device__ __forceinline__ void pack_routes(const RankLaunch& launch, const NetworkParams& params,
                                            const Tables& tables, const NetworkTables& network,
                                            const RelayWarp& warp) {
  const moe::CudaRouting& routing = params.routing;
  const int lane = threadIdx.x % 32;
  const moe::PacketChunks& chunks = params.route_chunks;
  const moe::Counts counts(routing, launch.area(routing.rank, 0));
  const auto last_item = static_cast<uint32_t>(routing.num_items() - 1);
  const auto* leaders = reinterpret_cast<const uint32_t*>(
      launch.area(routing.rank, static_cast<size_t>(params.network.leaders(network.regions))));
  const Tracer tracer(params.comm.trace, trace_track());
  int node = 0;
  uint32_t unit = 0;
#pragma unroll 1
  for (uint32_t turn = warp.index; network.packs.at(turn, &node, &unit); turn += warp.count) {
    const uint32_t count = counts.node_tokens(routing.rank, node);
    const int chunk = chunks.chunk_of_unit(count, unit);
    const uint32_t first = network.packed_begins[node] + unit * static_cast<uint32_t>(chunks.unit_packets);
    const auto num = static_cast<int>(chunks.packets_of_unit(count, unit));
    tracer.begin(TraceKind::copy, chunk, routing.rank);
    // From the L2: other SMs have written it.
    const uint32_t item = lane < num ? min(__ldcg(leaders + first + lane), last_item) : 0;
    write_routes(launch, params, counts, tables, network, node, first, num, item);
    count_unit(launch, params.comm, params.numbers.packed(node, chunk), chunks.units_of_chunk(count, chunk));
    tracer.end();
  }
}

// A row, and its block, of those of a home's that come here.
__device__ __forceinline__ AwaitedRow come_row(const NetworkParams& params, const NetworkTables& network,
                                               int home, uint32_t row, uint32_t block) {
  const uint32_t number = network.block_begins[home] + block;
  return {network.row_begins[home] + row, params.first_flag + static_cast<int>(number), number};
}

// By a whole warp: the rows of the `token`-th of those that a home has listed for this node. Waits for them.
// False: the launch is to end.
__device__ __forceinline__ bool find_relayed_rows(const RankLaunch& launch, const NetworkParams& params,
                                                  const moe::Counts& counts, const Tables& tables,
                                                  const NetworkTables& network, int home, uint32_t token,
                                                  TokenRows* found) {
  const moe::CudaRouting& routing = params.routing;
  const int lane = threadIdx.x % 32;
  const auto* const routes = reinterpret_cast<const int4*>(launch.area(
      routing.rank,
      static_cast<size_t>(params.network.route(network.regions, network.relayed_begins[home] + token))));
  SumRoute route{-1, 0, 0, 0.0f};
  if (lane < routing.topk) {
    const int4 words = __ldcg(routes + lane);
    route = reinterpret_cast<const SumRoute&>(words);
  }
  // Whatever has come, nothing is read but the home's rows.
  bool has_row = false, is_there = true;
  uint32_t row = 0;
  if (route.expert >= 0 && route.expert < routing.experts) {
    const int rank = route.expert / routing.experts_per_rank;
    AwaitedRow its;
    if (rank == routing.rank) {
      has_row = route.row < counts.expert_rows(home, route.expert);
      its = kept_row(routing, tables, route.expert, home, route.row);
    } else {
      has_row = route.row < network.list_rows[home] && route.block < network.list_blocks[home];
      its = come_row(params, network, home, route.row, route.block);
    }
    row = its.row;
    if (has_row)
      is_there = launch.wait_flag(its.flag, DeviceRole::reduce, DeviceObject::row_block, rank, its.block);
  }
  is_there = __all_sync(~0u, is_there);
  __syncwarp();
  *found = order_rows(routing.topk, has_row, route.expert, row, route.weight);
  return is_there;
}

// The sums of the tokens that this rank relays for, in the order in which they are listed and of each home in
// turn, to where the network takes them.
template <class Buffers>
__device__ __forceinline__ void sum_relayed(const RankLaunch& launch, const NetworkParams& params,
                                            const Tables& tables, const NetworkTables& network,
                                            const RelayWarp& warp, Buffers&& buffers) {
  const moe::CudaRouting& routing = params.routing;
  const int lane = threadIdx.x % 32;
  const moe::PacketChunks& chunks = params.sum_chunks;
  const moe::Counts counts(routing, launch.area(routing.rank, 0));
  const int own_node = params.nodes.node[routing.rank];
  const std::byte* const rows_begin = launch.area(routing.rank, static_cast<size_t>(params.network.row(0)));
  const Tracer tracer(params.comm.trace, trace_track());
  int home = 0;
  uint32_t unit = 0;
#pragma unroll 1
  for (uint32_t turn = warp.index; network.sums.at(turn, &home, &unit); turn += warp.count) {
    const uint32_t count = counts.node_tokens(home, own_node);
    const int chunk = chunks.chunk_of_unit(count, unit);
    const uint32_t first = unit * static_cast<uint32_t>(chunks.unit_packets);
    const uint32_t end = first + chunks.packets_of_unit(count, unit);
#pragma unroll 1
    for (uint32_t token = first; token < end; ++token) {
      const int route_chunk = params.route_chunks.chunk_of(count, token);
      bool is_there = true;
      if (lane == 0) {
        is_there = launch.wait_flag(params.numbers.routed(home, route_chunk), DeviceRole::reduce,
                                    DeviceObject::chunk, home, route_chunk);
      }
      if (!__shfl_sync(~0u, static_cast<int>(is_there), 0)) return;
      __syncwarp();
      TokenRows rows;
      if (!find_relayed_rows(launch, params, counts, tables, network, home, token, &rows)) return;
      const uint64_t start = tracer.now();
      const int64_t sum =
          NetworkLayout::first_sum_to_send(network.regions) + network.relayed_begins[home] + token;
      sum_token(params, rows_begin, rows, all_strips(params),
                launch.area(routing.rank, static_cast<size_t>(params.network.row(sum))), buffers);
      tracer.record(TraceKind::reduce, start, token, home);
    }
    count_unit(launch, params.comm, params.numbers.made(home, chunk), chunks.units_of_chunk(count, chunk));
  }
}

// A CTA that sums for other nodes, all threads. It owes routes before it waits for anything.
template <int NUM_THREADS>
__device__ __forceinline__ void run_relay_cta(const RankLaunch& launch, const NetworkParams& params,
                                              const Tables& tables, const NetworkTables& network,
                                              SumStorage& storage) {
  if (threadIdx.x == 0) {
    sums_init(storage);
    moe::wait_routed(launch);
  }
  __syncthreads();
  const RelayWarp warp = relay_warp(params);
  pack_routes(launch, params, tables, network, warp);
  sum_relayed(launch, params, tables, network, warp, SumBuffers<NUM_THREADS / 32>(storage, threadIdx.x / 32));
}

// By a whole warp: the place of a token in its list for a node, from the item of a lane that leads it there.
// Waits for the sum. `sum`: its number among the rows. False: the launch is to end.
__device__ __forceinline__ bool find_sum(const RankLaunch& launch, const NetworkParams& params,
                                         const moe::Counts& counts, const Tables& tables,
                                         const NetworkTables& network, int node, int expert, int slot,
                                         bool* has_sum, uint32_t* sum) {
  const uint32_t* const note = place_note(launch, params, counts, tables, network, expert, slot);
  if (note == nullptr) return true;
  const uint32_t place = __ldcg(note);
  const uint32_t count = counts.node_tokens(params.comm.rank, node);
  const uint32_t token = place - network.packed_begins[node];
  if (token >= count) return true;
  *has_sum = true;
  *sum = static_cast<uint32_t>(NetworkLayout::first_sum(network.regions)) + place;
  const int chunk = params.sum_chunks.chunk_of(count, token);
  return launch.wait_flag(params.numbers.summed(node, chunk), DeviceRole::reduce, DeviceObject::partial,
                          collector_of(params.nodes, params.comm.nranks, params.comm.rank, node), chunk);
}

// By a whole warp: a token's rows from this node, and the sums of other nodes' as rows of weight 1; all in the
// order of nodes and, in this one, experts. Waits for them. False: the launch is to end.
__device__ __forceinline__ bool find_rows_and_sums(const RankLaunch& launch, const NetworkParams& params,
                                                   const moe::Counts& counts, const Tables& tables,
                                                   const NetworkTables& network, int64_t token,
                                                   TokenRows* found) {
  const moe::CudaRouting& routing = params.routing;
  const int lane = threadIdx.x % 32;
  const int own_node = params.nodes.node[routing.rank];
  moe::RecordItem item = {-1, 0};
  if (lane < routing.topk) item = routing.items[token * routing.topk + lane];
  const bool is_expert = item.expert >= 0 && item.expert < routing.experts;
  const int node = is_expert ? params.nodes.node[item.expert / routing.experts_per_rank] : -1;
  const int place = is_expert ? params.nodes.place(routing, item.expert) : 0;
  // As moe::leads().
  bool leads = is_expert && node != own_node;
#pragma unroll 1
  for (int k = 0; k < routing.topk; ++k) {
    const int other_node = __shfl_sync(~0u, node, k);
    const int other_place = __shfl_sync(~0u, place, k);
    leads = leads && !(other_node == node && moe::comes_before(routing, other_place, place));
  }
  bool is_there = true, has_row = false;
  uint32_t row = 0;
  float weight = 1.0f;
  if (leads) {
    is_there = find_sum(launch, params, counts, tables, network, node, item.expert, item.slot, &has_row, &row);
  } else if (is_expert && node == own_node &&
             static_cast<uint32_t>(item.slot) < counts.expert_rows(routing.rank, item.expert)) {
    has_row = true;
    weight = params.weights[token * routing.topk + lane];
    const int rank = item.expert / routing.experts_per_rank;
    const auto slot = static_cast<uint32_t>(item.slot);
    const AwaitedRow its = rank == routing.rank
                               ? kept_row(routing, tables, item.expert, rank, slot)
                               : come_row(params, network, routing.rank, tables.home_rows[item.expert] + slot,
                                          tables.home_blocks[item.expert] + slot / moe::BLOCK_ROWS);
    row = its.row;
    is_there = launch.wait_flag(its.flag, DeviceRole::reduce, DeviceObject::row_block, rank, its.block);
  }
  is_there = __all_sync(~0u, is_there);
  __syncwarp();
  *found = order_rows(routing.topk, has_row, node * moe::CUDA_MAX_EXPERTS + item.expert, row, weight);
  return is_there;
}

// One of `num_warps`, of a CTA that computes, when it is through with its tiles.
template <class Buffers>
__device__ __forceinline__ void sum_own_tokens(const RankLaunch& launch, const NetworkParams& params,
                                               const Tables& tables, const NetworkTables& network,
                                               int num_warps, Buffers&& buffers) {
  if (threadIdx.x % 32 == 0) moe::wait_routed(launch);
  __syncwarp();
  const moe::Counts counts(params.routing, launch.area(params.comm.rank, 0));
  sum_tokens(launch, params, num_warps, buffers, [&](int64_t token, TokenRows* rows) {
    return find_rows_and_sums(launch, params, counts, tables, network, token, rows);
  });
}

}  // namespace mk::moe_gemm_combine
