// SPDX-License-Identifier: MIT
// Gradients of ring attention between nodes: where parts go (network_parts.h), and the roles of the CTA that
// has the network: beside those that move keys and values, one that puts the parts that it relays to the owners
// of the keys, and one that tells of the parts that have come from there.
#pragma once

#include "kernels/ops/ring_attention/cuda_network.cuh"
#include "kernels/ops/ring_attention_backward/cuda_parts.cuh"

namespace mk::ring_attention_backward {

// ---------------------------------------------------------------- own places

__device__ __forceinline__ KeyTilesOf<FarRanksFirst> key_tiles_of(const NetworkParams& params) {
  return {params.tiles.slices,
          {{params.comm.order.rank_at}},
          params.panels.num_heads,
          params.panels.heads_at_once(params.tiles.slices.causal)};
}
template <HasRoutes Params>
__device__ __forceinline__ int part_receiver(const Params& params, const KeyTile& tile) {
  return params.routes.receiver[source_of(params, tile.step)];
}
template <HasRoutes Params>
__device__ __forceinline__ int part_slot(const Params& params, const KeyTile& tile) {
  return params.routes.slot[source_of(params, tile.step)];
}
template <HasRoutes Params>
__device__ __forceinline__ size_t part_offset(const Params& params, int slot, const KeyTile& tile) {
  return params.panels.part(slot, source_of(params, tile.step), tile.head, tile.run, tile.index);
}
// Behind those of keys that are pushed or forwarded.
template <HasRoutes Params>
__device__ __forceinline__ int first_part_count(const Params& params) {
  return static_cast<int>(params.panels.Keys::num_flags());
}

// --------------------------------------------------------------- the network

// Is it time for parts? Not while this rank has tiles to hand out, for then the others may have, too, and those
// take as long as they take.
template <HasRoutes Params>
__device__ __forceinline__ bool parts_are_due(const RankLaunch& launch, const Params& params) {
  return ptx::ld_relaxed_gpu(&launch.progress().gather_ticket) >= static_cast<uint32_t>(params.num_key_tiles);
}

// A lane's next put of parts: of relayed parts `lane`, lane + 32, ... those that there are.
template <HasRoutes Params>
class PartSender {
 public:
  __device__ PartSender(const RankLaunch& launch, const Params& params, int lane)
      : launch_(launch), params_(params), relayed_(lane) {
    skip_missing();
  }

  __device__ bool is_pending() const {
    return relayed_ < num_relayed_parts(params_.comm.order) && params_.panels.num_puts() > 0;
  }
  // Those that follow are of a pending one.
  __device__ RelayedParts parts() const {
    return relayed_parts(params_.comm.order, params_.routes, params_.comm.nranks, relayed_);
  }
  __device__ KeyPut put() const { return params_.panels.put(parts().owner, index_); }
  // Are all of them here? A flag once seen is not looked at again.
  __device__ bool is_whole() {
    const KeyPut of = put();
    const int num_flags = of.num_heads * params_.panels.num_panels(of);
    while (num_seen_ < num_flags && is_here(of)) ++num_seen_;
    return num_seen_ == num_flags;
  }
  // Where it stands.
  __device__ int awaited_flag() const {
    const KeyPut of = put();
    const int head = num_seen_ / params_.panels.num_panels(of);
    return params_.panels.part_panel_flag(parts().slot, of.head + head, of.run, awaited_panel(of));
  }
  __device__ int index() const { return index_; }
  __device__ void advance() {
    step();
    skip_missing();
  }

 private:
  __device__ int awaited_panel(const KeyPut& of) const {
    return of.panel + num_seen_ % params_.panels.num_panels(of);
  }
  // Or is there nothing to come?
  __device__ bool is_here(const KeyPut& of) const {
    const RelayedParts of_rank = parts();
    return !params_.panels.has_panel_parts(of.run, awaited_panel(of), of_rank.owner, of_rank.source) ||
           ptx::ld_relaxed_sys(launch_.flag(params_.comm.rank, awaited_flag())) >= launch_.epoch();
  }
  __device__ void step() {
    num_seen_ = 0;
    if (++index_ < params_.panels.num_puts()) return;
    index_ = 0;
    relayed_ += 32;
  }
  __device__ void skip_missing() {
    while (is_pending() && !params_.panels.has_parts(put(), parts().owner, parts().source)) step();
  }

  const RankLaunch& launch_;
  const Params& params_;
  int relayed_;
  int index_ = 0;
  int num_seen_ = 0;  // panels of it that are here
};

// Puts the parts of this node's ranks to the owners of the keys that this rank relays for, once they are here.
// A lane for each rank and owner: none that is late holds up the others.
template <HasRoutes Params>
__device__ __forceinline__ void send_parts(const RankLaunch& launch, const NetworkLaunch& network,
                                           const Params& params) {
  const auto& panels = params.panels;
  const int lane = threadIdx.x % 32;
  PartSender mine(launch, params, lane);
  Patience patience(launch, NETWORK_POLL_PAUSE_NS);
  while (__any_sync(~0u, mine.is_pending())) {
    const bool is_pending = mine.is_pending();
    const bool is_due = is_pending && mine.is_whole();
    __syncwarp();
    if (__any_sync(~0u, is_due)) {
      int owner = 0;
      uint64_t source = 0, target = 0;
      uint32_t num_bytes = 0;
      int signal = 0;
      if (is_due) {
        ptx::fence_acq_rel_sys();  // behind the flags, before the network reads what they stand for
        const RelayedParts parts = mine.parts();
        const KeyPut put = mine.put();
        const int tile = panels.first_tile(put);
        owner = parts.owner;
        source = network.area_address(panels.part(parts.slot, owner, put.head, put.run, tile));
        target = network.area_address(
            panels.part(panels.slot_at_owner(owner, parts.source), owner, put.head, put.run, tile));
        num_bytes = static_cast<uint32_t>(panels.part_put_bytes(put));
        signal = panels.part_signal(parts.source, mine.index());
      }
      __syncwarp();
      if (!network.put(is_due, owner, source, target, num_bytes, signal, DeviceRole::send)) return;
      if (is_due) mine.advance();
      patience.progressed();
      continue;
    }
    const int waiting = __ffs(static_cast<int>(__ballot_sync(~0u, is_pending))) - 1;
    const int flag = __shfl_sync(~0u, is_pending ? mine.awaited_flag() : 0, waiting);
    const int peer = __shfl_sync(~0u, is_pending ? mine.parts().source : 0, waiting);
    bool goes_on = true;
    if (lane == 0) {
      if (!parts_are_due(launch, params)) patience.progressed();
      goes_on = patience.goes_on({DeviceRole::send, DeviceObject::partial, peer, static_cast<uint64_t>(flag),
                                  launch.epoch() - 1, launch.epoch()});
    }
    if (!__shfl_sync(~0u, static_cast<int>(goes_on), 0)) return;
  }
}

// Parts of this rank's keys, of the ranks of other nodes.
template <HasRoutes Params>
struct PartArrivals {
  static constexpr DeviceObject OBJECT = DeviceObject::partial;
  const RankLaunch& launch;
  const Params& params;

  __device__ __forceinline__ bool are_due() const { return parts_are_due(launch, params); }
  __device__ __forceinline__ int num_sources() const {
    return params.comm.nranks - params.comm.order.num_local;
  }
  __device__ __forceinline__ int source(int i) const {
    return params.comm.order.rank_at[params.comm.order.num_local + i];
  }
  __device__ __forceinline__ KeyPut put(int, int index) const {
    return params.panels.put(params.comm.rank, index);
  }
  __device__ __forceinline__ bool is_sent(const KeyPut& put, int source) const {
    return params.panels.has_parts(put, params.comm.rank, source);
  }
  __device__ __forceinline__ int signal(int source, int index) const {
    return params.panels.part_signal(source, index);
  }
  __device__ __forceinline__ int flag(int source, int head, int run, int panel) const {
    return params.panels.part_panel_flag(params.panels.slot_at_owner(params.comm.rank, source), head, run,
                                         panel);
  }
};

// The CTA that has the network: a warp a role, and at the end the launch's puts.
template <HasRoutes Params>
__device__ inline void run_network_cta(const RankLaunch& launch, const Params& params) {
  const NetworkLaunch network(launch, params.comm);
  const int warp = threadIdx.x / 32;
  if (warp == 0) network.greet();
  if (warp == 1) ring_attention::send_keys(launch, network, params);
  if (warp == 2) ring_attention::receive_keys(launch, network, params);
  if (warp == 3) send_parts(launch, network, params);
  if (warp == 4)
    ring_attention::receive_puts(launch, network, params.comm, params.panels,
                                 PartArrivals<Params>{launch, params});
  __syncthreads();
  if (warp == 0) network.wait_for_puts();
}

}  // namespace mk::ring_attention_backward
