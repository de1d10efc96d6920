// SPDX-License-Identifier: MIT
// The first phase of a mixture-of-experts kernel on GPUs of several nodes: as inside one node, but that tokens
// for other nodes are counted, too, and that the CTA which has the network brings counts to the other nodes and
// theirs to this one.
#pragma once

#include "kernels/device/network_launch.cuh"
#include "kernels/ops/moe_routing/cuda_routing.cuh"
#include "kernels/ops/moe_routing/node_tokens.h"

namespace mk::moe {

__device__ __forceinline__ bool has_network() { return blockIdx.x == gridDim.x - 1; }

template <int NUM_THREADS>
struct NetworkCountingStorage : CountingStorage<NUM_THREADS> {
  using CountingStorage<NUM_THREADS>::NUM_WARPS;
  uint32_t led[NUM_WARPS][CUDA_MAX_EXPERTS];  // tokens of the warp's items, by the expert that leads them
  uint32_t begins[MAX_PLACES + 1];            // of packed tokens, by place
  ListPlace list_places[CUDA_MAX_EXPERTS];
};

// Tokens led by each expert, of each counting CTA: behind what cta_rows() has of all.
__device__ __forceinline__ uint32_t* cta_tokens(const RankComm& comm, const CudaRouting& routing, int cta) {
  static_assert(2 * MAX_COUNTING_CTAS * CUDA_MAX_EXPERTS * sizeof(uint32_t) <= STAGING_BYTES / 2);
  return cta_rows(comm, routing, MAX_COUNTING_CTAS + cta);
}

// The expert of an item that leads its token, else -1.
__device__ __forceinline__ int leading_expert(const CudaRouting& routing, const ListPlace* list_places,
                                              int64_t item) {
  const int k = choice_of(routing, item);
  const bool is_leader = leads(routing, k, [&](int other) {
    const auto expert = static_cast<uint64_t>(expert_at(routing, item - k + other));
    return expert < static_cast<uint64_t>(routing.experts) ? list_places[expert] : ListPlace{-1};
  });
  return is_leader ? static_cast<int>(expert_at(routing, item)) : -1;
}

// Counted beside rows: RowsAlone's functions.
template <int NUM_THREADS>
struct TokensOfNodes {
  const RankComm& comm;
  const CudaRouting& routing;
  const NodeMap& nodes;
  NetworkCountingStorage<NUM_THREADS>& smem;

  __device__ void clear() const {
    for (int i = threadIdx.x; i < smem.NUM_WARPS * CUDA_MAX_EXPERTS; i += NUM_THREADS) (&smem.led[0][0])[i] = 0;
    for (int expert = threadIdx.x; expert < routing.experts; expert += NUM_THREADS)
      smem.list_places[expert] = ListPlace::of(routing, nodes, expert);
  }
  __device__ void count(int64_t begin, int64_t end) const {
    number_by_expert(
        smem.led[threadIdx.x / 32], begin, end,
        [&](int64_t item) { return leading_expert(routing, smem.list_places, item); },
        [](int64_t, int, uint32_t) {});
  }
  __device__ void publish() const {
    for (int expert = threadIdx.x; expert < routing.experts; expert += NUM_THREADS) {
      uint32_t tokens = 0;
#pragma unroll
      for (int warp = 0; warp < smem.NUM_WARPS; ++warp) tokens += smem.led[warp][expert];
      __stcg(cta_tokens(comm, routing, blockIdx.x) + expert, tokens);
    }
  }
  __device__ void add_up(uint32_t* numbers) const {
    for (int expert = threadIdx.x; expert < routing.experts; expert += NUM_THREADS) {
      uint32_t tokens = 0;
#pragma unroll 8
      for (int cta = 0; cta < routing.num_counting_ctas; ++cta)
        tokens += __ldcg(cta_tokens(comm, routing, cta) + expert);
      const int node = nodes.node[expert / routing.experts_per_rank];
      if (tokens > 0) atomicAdd(&numbers[routing.node_tokens_at + node], tokens);
    }
  }
};

// A block of counts that a put has brought, to the ranks of the node; a whole warp, which sees it.
__device__ inline void forward_counts(const RankLaunch& launch, const RankComm& comm,
                                      const CudaRouting& routing, int source) {
  const int lane = threadIdx.x % 32;
  const size_t place = size_t{1} * source * routing.block_bytes;
  const auto* from = reinterpret_cast<const uint32_t*>(launch.area(comm.rank, place));
  for (int i = lane; i < routing.block_bytes / 4; i += 32) {
    const uint32_t word = __ldcg(from + i);
    for (int step = 1; step < comm.order.num_local; ++step)
      reinterpret_cast<uint32_t*>(launch.area(comm.order.rank_at[step], place))[i] = word;
  }
  __syncwarp();
  for (int step = lane; step < comm.order.num_local; step += 32)
    launch.raise_flag(comm.order.rank_at[step], source);
  __syncwarp();
}

MK_HOST_DEVICE int counts_signal(int source) { return kEntrySignals + source; }

// A warp of the CTA that has the network: own counts to the rail peers, and those of the ranks that this one
// relays for to this node. Waits for nobody who waits for it.
__device__ inline void exchange_counts(const RankLaunch& launch, const NetworkLaunch& network,
                                       const RankComm& comm, const CudaRouting& routing) {
  const int lane = threadIdx.x % 32;
  bool is_here = true;
  if (lane == 0)
    is_here = launch.wait_flag(comm.rank, DeviceRole::send, DeviceObject::counts, comm.rank, comm.rank);
  if (!__shfl_sync(~0u, static_cast<int>(is_here), 0)) return;
  __syncwarp();
  const bool has_put = lane < comm.order.num_rail_peers;
  const uint64_t place = network.area_address(size_t{1} * comm.rank * routing.block_bytes);
  if (!network.put(has_put, has_put ? comm.order.rail_peers[lane] : 0, place, place,
                   static_cast<uint32_t>(routing.block_bytes), counts_signal(comm.rank), DeviceRole::send))
    return;
  bool is_pending = lane < comm.order.num_relayed;
  const int source = is_pending ? comm.order.relayed[lane] : 0;
  Patience patience(launch, NETWORK_POLL_PAUSE_NS);
  while (true) {
    const unsigned pending = __ballot_sync(~0u, is_pending);
    if (pending == 0) return;
    const bool has_come = is_pending && network.take_signal(counts_signal(source));
    const unsigned fresh = __ballot_sync(~0u, has_come);
    __syncwarp();  // what a lane has acquired holds for all
    for (unsigned left = fresh; left != 0; left &= left - 1)
      forward_counts(launch, comm, routing, __shfl_sync(~0u, source, __ffs(static_cast<int>(left)) - 1));
    is_pending = is_pending && !has_come;
    if (fresh != 0) {
      patience.progressed();
      continue;
    }
    const int missing = __shfl_sync(~0u, source, __ffs(static_cast<int>(pending)) - 1);
    bool goes_on = true;
    if (lane == 0) {
      goes_on = patience.goes_on({DeviceRole::receive, DeviceObject::counts, missing,
                                  static_cast<uint64_t>(missing), launch.epoch() - 1, launch.epoch()});
    }
    if (!__shfl_sync(~0u, static_cast<int>(goes_on), 0)) return;
  }
}

// route() between nodes.
template <int NUM_THREADS, class BytesOf>
__device__ void route_between_nodes(const RankLaunch& launch, const NetworkLaunch& network,
                                    const RankComm& comm, const CudaRouting& routing, const NodeMap& nodes,
                                    NetworkCountingStorage<NUM_THREADS>& smem, RoutingDecision& decision,
                                    BytesOf&& bytes_of) {
  const int warp = threadIdx.x / 32;
  if (has_network()) {
    if (warp == 0) network.greet();
    if (warp == 1) exchange_counts(launch, network, comm, routing);
  } else if (static_cast<int>(blockIdx.x) < routing.num_counting_ctas) {
    count_rows<NUM_THREADS>(launch, comm, routing, smem,
                            TokensOfNodes<NUM_THREADS>{comm, routing, nodes, smem});
  }
  if (warp == 0) await_decision(launch, comm, routing, decision, bytes_of);
  __syncthreads();
}

// A counting CTA, all threads, once the launch goes on: visit(item, expert, place) for each token and node that
// it is listed for, where all lists follow each other. The warps go through the items that they have counted.
template <int NUM_THREADS, class Visit>
__device__ void place_tokens(const RankComm& comm, const CudaRouting& routing, const NodeMap& nodes,
                             NetworkCountingStorage<NUM_THREADS>& smem, Visit&& visit) {
  const int num_places = nodes.num_places(routing);
  for (int place = threadIdx.x; place < num_places; place += NUM_THREADS) smem.begins[place] = 0;
  __syncthreads();
  for (int expert = threadIdx.x; expert < routing.experts; expert += NUM_THREADS) {
    uint32_t tokens = 0, before = 0;
#pragma unroll 8
    for (int cta = 0; cta < routing.num_counting_ctas; ++cta) {
      if (cta == static_cast<int>(blockIdx.x)) before = tokens;
      tokens += __ldcg(cta_tokens(comm, routing, cta) + expert);
    }
    smem.begins[nodes.place(routing, expert)] = tokens;
    for (auto& led : smem.led) {
      const uint32_t more = led[expert];
      led[expert] = before;
      before += more;
    }
  }
  __syncthreads();
  if (threadIdx.x < 32) exclusive_scan(smem.begins, num_places);
  __syncthreads();
  const WarpItems<NUM_THREADS> items(routing);
  number_by_expert(
      smem.led[threadIdx.x / 32], items.begin, items.end,
      [&](int64_t item) { return leading_expert(routing, smem.list_places, item); },
      [&](int64_t item, int expert, uint32_t number) {
        if (expert >= 0) visit(item, expert, smem.begins[nodes.place(routing, expert)] + number);
      });
}

}  // namespace mk::moe
