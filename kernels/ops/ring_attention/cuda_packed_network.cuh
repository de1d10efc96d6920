// SPDX-License-Identifier: MIT
// Ring attention over packed sequences between nodes: what the roles of cuda_network.cuh need to know and find
// out of cu_seqlens, each CTA for itself.
#pragma once

#include "kernels/ops/ring_attention/cuda_network.cuh"
#include "kernels/ops/ring_attention/cuda_packed.cuh"

namespace mk::ring_attention {

// Of a CTA, in shared memory: PackedNetworkPanels::needed_by, which points here once begin_packed() is done.
constexpr int MOST_NEEDS = MAX_GPU_RANKS * MOST_PANELS;
using PanelNeeds = RankSet[MOST_NEEDS];

// Does what a CTA that forwards keeps at the beginning of a CTA's storage end before its parameters? Compilers
// warn of offsets in types derived from others, and know them all the same.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Winvalid-offsetof"
#pragma nv_diag_suppress 1427
template <class Config, class Storage>
constexpr bool has_room_to_forward() {
  return __builtin_offsetof(Storage, packed) >= sizeof(ForwardStorage<Config>);
}
#pragma nv_diag_default 1427
#pragma GCC diagnostic pop

// By one thread, from begin_packed().
template <HasNodes Params>
__device__ __forceinline__ void settle_network(Params& params, const PanelNeeds& needs) {
  params.panels.slices = params.tiles.slices;
  params.panels.needed_by = needs;
}

// By all threads of a CTA, behind begin_packed(): who needs this rank's panels and, with RELAYS, which of those
// that come to it from other nodes.
template <int NUM_THREADS, bool RELAYS, HasNodes Params>
__device__ inline void find_needs(const Params& params, PanelNeeds& needs) {
  const PackedNetworkPanels& panels = params.panels;
  const RankOrder& order = params.comm.order;
  for (int i = threadIdx.x; i < params.comm.nranks * panels.run_panels; i += NUM_THREADS) needs[i] = 0;
  __syncthreads();
  const auto find = [&](int source, int panel, int peer) {
    if (needs_panel(panels, panels.slices, panels.block_n, source, panel, peer))
      atomicOr(&needs[source * panels.run_panels + panel], RankSet{1} << peer);
  };
  const int num_others = params.comm.nranks - 1;
  for (int i = threadIdx.x; i < panels.run_panels * num_others; i += NUM_THREADS)
    find(params.comm.rank, i / num_others, order.rank_at[1 + i % num_others]);
  if (RELAYS) {
    const int of_source = panels.run_panels * order.num_local;
    for (int i = threadIdx.x; i < order.num_relayed * of_source; i += NUM_THREADS) {
      const int within = i % of_source;
      find(order.relayed[i / of_source], within / order.num_local, order.rank_at[within % order.num_local]);
    }
  }
  __syncthreads();
}

// The CTA that has the network, if there is nothing to do, or if cu_seqlens is wrong, by a warp: an error ends
// all waits, so that first the puts have ended.
template <class Storage>
__device__ inline void end_without_keys(const Storage& smem) {
  const RankLaunch launch(smem.params.comm);
  const NetworkLaunch network(launch, smem.params.comm);
  network.greet();
  network.wait_for_puts();
  report_fault(launch, smem);
}

}  // namespace mk::ring_attention
