// SPDX-License-Identifier: MIT
// Ring attention between nodes: the roles that move keys and values, forward and backward. Push warps bring
// this rank's to the ranks of its node and, if another node needs them, to this rank's own receive area, where
// the network can read them. One CTA has the network: it puts them to the rail peers, and tells of what has
// come from there. Where a node has several ranks, some CTAs do nothing but forward what has come.
#pragma once

#include "kernels/device/arrival_window.h"
#include "kernels/device/bulk_push.cuh"
#include "kernels/device/network_launch.cuh"
#include "kernels/ops/ring_attention/cuda_params.h"
#include "kernels/ops/ring_attention/cuda_push.cuh"

namespace mk::ring_attention {

// ------------------------------------------------------------------ own keys

template <HasNodes Params>
__device__ __forceinline__ NodeOrder key_order(const Params& params) {
  return {params.comm.order.rank_at};
}
template <HasNodes Params>
__device__ __forceinline__ int source_of(const Params& params, int step) {
  return params.comm.order.rank_at[step];
}
template <HasNodes Params>
__device__ __forceinline__ int slot_of(const Params& params, int step) {
  return source_of(params, step);
}

// This rank itself, for the network, which has the longest way to go, then the others of its node.
template <HasNodes Params>
__device__ __forceinline__ int first_receiver(const Params&) {
  return 0;
}
template <HasNodes Params>
__device__ __forceinline__ int end_of_receivers(const Params& params) {
  return params.comm.order.num_local;
}
template <HasNodes Params>
__device__ __forceinline__ int receiver_at(const Params& params, int step) {
  const RankOrder& order = params.comm.order;
  return order.rank_at[step == 0 ? 0 : order.num_local - step];
}
template <class Config, HasNodes Params>
__device__ __forceinline__ bool receiver_needs(const Params& params, const PanelUnit& unit, int peer) {
  const int rank = params.comm.rank;
  const RankSet needed_by = params.panels.needed_by[unit.run][rank];
  return peer == rank ? (needed_by & ~params.nodes.own) != 0 : is_in(needed_by, peer);
}
template <HasNodes Params>
__device__ __forceinline__ int slot_at_receiver(const Params& params, int) {
  return params.comm.rank;
}

// Behind those of the ranks before: what is forwarded is counted, too.
template <HasNodes Params>
__device__ __forceinline__ int count_of_unit(const Params& params, int unit) {
  return params.comm.rank * params.panels.num_units() + unit;
}

// --------------------------------------------------------------- the network

// Of a put's panels that there are, each one's flag: flag(head, panel).
template <class Panels, class Flag, class Visit>
__device__ __forceinline__ void visit_flags(const Panels& panels, const KeyPut& put, Flag&& flag,
                                            Visit&& visit) {
  const int num_panels = panels.num_panels(put);
  for (int head = put.head; head < put.head + put.num_heads; ++head) {
    for (int panel = put.panel; panel < put.panel + num_panels; ++panel) {
      if (!visit(flag(head, panel))) return;
    }
  }
}

// Puts this rank's keys and values to the other nodes that need them, once they are whole in its receive area.
template <HasNodes Params>
__device__ __forceinline__ void send_keys(const RankLaunch& launch, const NetworkLaunch& network,
                                          const Params& params) {
  const auto& panels = params.panels;
  const RankOrder& order = params.comm.order;
  const int rank = params.comm.rank;
  const int lane = threadIdx.x % 32;
  const bool has_peer = lane < order.num_rail_peers;
  const int peer = has_peer ? order.rail_peers[lane] : 0;
  const RankSet node = has_peer ? params.nodes.of_rail[lane] : 0;
  for (int index = 0; index < panels.num_puts(); ++index) {
    const KeyPut put = panels.put(rank, index);
    const bool has_put = panels.enters(put, rank, node);
    if (!__any_sync(~0u, has_put)) continue;
    bool is_here = true;
    if (lane == 0) {
      visit_flags(
          panels, put, [&](int head, int panel) { return panels.flag(rank, head, put.run, panel); },
          [&](int flag) {
            is_here = launch.wait_flag(flag, DeviceRole::send, DeviceObject::chunk, rank, flag);
            return is_here;
          });
    }
    if (!__shfl_sync(~0u, static_cast<int>(is_here), 0)) return;
    __syncwarp();
    const uint64_t place = network.area_address(panels.offset(rank, put.head, put.run, put.block));
    if (!network.put(has_put, peer, place, place, static_cast<uint32_t>(panels.put_bytes(put)),
                     panels.signal(rank, index), DeviceRole::send)) {
      return;
    }
  }
}

// Tells this rank's other warps of puts that have come from the network: of arrivals.source(0), ... that many
// sources' all puts that there are. A lane keeps the account of each source.
template <class Panels, class Arrivals>
__device__ __forceinline__ void receive_puts(const RankLaunch& launch, const NetworkLaunch& network,
                                             const RankComm& comm, const Panels& panels,
                                             const Arrivals& arrivals) {
  const int lane = threadIdx.x % 32;
  const int num_sources = arrivals.num_sources();
  const int num_puts = panels.num_puts();
  const int num_mine = lane < num_sources ? num_puts : 0;
  ArrivalWindow mine;
  Patience patience(launch, NETWORK_POLL_PAUSE_NS);
  while (__any_sync(~0u, mine.first < num_mine)) {
    bool has_any = false;
    for (int i = 0; i < num_sources; ++i) {
      const int source = arrivals.source(i);
      const ArrivalWindow window = {__shfl_sync(~0u, mine.first, i), __shfl_sync(~0u, mine.arrived, i)};
      const int index = window.first + lane;
      bool has_come = false;
      if (index < num_puts && window.is_missing(lane)) {
        // Nobody waits for what is not sent.
        const KeyPut put = arrivals.put(source, index);
        const bool is_sent = arrivals.is_sent(put, source);
        has_come = !is_sent || network.take_signal(arrivals.signal(source, index));
        if (is_sent && has_come) {
          ptx::fence_acq_rel_sys();
          visit_flags(
              panels, put, [&](int head, int panel) { return arrivals.flag(source, head, put.run, panel); },
              [&](int flag) {
                launch.raise_flag_relaxed(comm.rank, flag);
                return true;
              });
        }
      }
      const uint32_t fresh = __ballot_sync(~0u, has_come);
      has_any = has_any || fresh != 0;
      if (lane == i) mine.add(fresh);
    }
    if (has_any) {
      patience.progressed();
      continue;
    }
    const int waiting = __ffs(static_cast<int>(__ballot_sync(~0u, mine.first < num_mine))) - 1;
    const int index = __shfl_sync(~0u, mine.first, waiting);
    bool goes_on = true;
    if (lane == 0) {
      if (!arrivals.are_due()) patience.progressed();
      goes_on = patience.goes_on({DeviceRole::receive, Arrivals::OBJECT, arrivals.source(waiting),
                                  static_cast<uint64_t>(index), launch.epoch() - 1, launch.epoch()});
    }
    if (!__shfl_sync(~0u, static_cast<int>(goes_on), 0)) return;
  }
}

// Keys of the ranks relayed.
template <class Params>
struct KeyArrivals {
  static constexpr DeviceObject OBJECT = DeviceObject::chunk;
  const Params& params;

  __device__ __forceinline__ bool are_due() const { return true; }
  __device__ __forceinline__ int num_sources() const { return params.comm.order.num_relayed; }
  __device__ __forceinline__ int source(int i) const { return params.comm.order.relayed[i]; }
  __device__ __forceinline__ KeyPut put(int source, int index) const {
    return params.panels.put(source, index);
  }
  __device__ __forceinline__ bool is_sent(const KeyPut& put, int source) const {
    return params.panels.enters(put, source, params.nodes.own);
  }
  __device__ __forceinline__ int signal(int source, int index) const {
    return params.panels.signal(source, index);
  }
  __device__ __forceinline__ int flag(int source, int head, int run, int panel) const {
    return params.panels.flag(source, head, run, panel);
  }
};
template <HasNodes Params>
__device__ __forceinline__ void receive_keys(const RankLaunch& launch, const NetworkLaunch& network,
                                             const Params& params) {
  receive_puts(launch, network, params.comm, params.panels, KeyArrivals<Params>{params});
}

// The CTA that has the network: a warp a role, and at the end the launch's puts.
template <HasNodes Params>
__device__ inline void run_network_cta(const RankLaunch& launch, const Params& params) {
  const NetworkLaunch network(launch, params.comm);
  const int warp = threadIdx.x / 32;
  if (warp == 0) network.greet();
  if (warp == 1) send_keys(launch, network, params);
  if (warp == 2) receive_keys(launch, network, params);
  __syncthreads();
  if (warp == 0) network.wait_for_puts();
}

// ---------------------------------------------------------------- forwarding

// The ranks of this node that a panel of another one is forwarded to.
template <HasNodes Params>
__device__ __forceinline__ RankSet forward_receivers(const Params& params, int source, int run, int panel) {
  return params.panels.needs(source, run, panel) & params.nodes.own & ~(RankSet{1} << params.comm.rank);
}

// Takes blocks that this rank relays, waits for each, and pushes it to the ranks of the node that need it. None
// is begun before the one before it has arrived: a warp that waits here owes nobody anything.
template <HasNodes Params, class Storage, class Done>
__device__ __forceinline__ void forward_keys(const RankLaunch& launch, const Params& params,
                                             BulkPush<Storage>& push, Done&& done) {
  constexpr int PIECE_BYTES = Storage::PIECE_BYTES;
  const auto& panels = params.panels;
  const RankOrder& order = params.comm.order;
  const bool leads = threadIdx.x % 32 == 0;
  const ForwardBlocks forwards(panels, order);
  while (true) {
    int index = leads ? static_cast<int>(atomicAdd(&launch.progress().push_ticket, 1u)) : 0;
    index = __shfl_sync(~0u, index, 0);
    if (index >= forwards.size()) return;
    ForwardBlock block;
    if (!forwards.at(index, &block)) continue;
    const int panel = block.block / panels.panel_blocks;
    const RankSet receivers = forward_receivers(params, block.source, block.run, panel);
    if (receivers == 0) continue;
    const int flag = panels.flag(block.source, block.head, block.run, panel);
    bool is_here = true;
    if (leads) is_here = launch.wait_flag(flag, DeviceRole::copy, DeviceObject::chunk, block.source, flag);
    if (!__shfl_sync(~0u, static_cast<int>(is_here), 0)) return;
    __syncwarp();
    // The copy engine is another proxy than the load that saw the flag.
    ptx::fence_proxy_async_global();
    const size_t begin = panels.offset(block.source, block.head, block.run, block.block);
    const int num_pieces = panels.block_bytes() / PIECE_BYTES;
    int next_piece = 0;
    push.template move<int>(
        [&](int* piece) {
          *piece = next_piece;
          return next_piece++ < num_pieces;
        },
        [&](int piece, uint8_t* buffer, uint64_t* loaded) {
          if (!leads) return;
          ptx::mbarrier_arrive_expect_tx(loaded, PIECE_BYTES);
          ptx::cp_async_bulk_shared_global(
              buffer, launch.area(params.comm.rank, begin + static_cast<size_t>(piece) * PIECE_BYTES),
              PIECE_BYTES, loaded);
        },
        [&](int piece, const uint8_t* buffer) {
          if (leads) {
#pragma unroll 1
            for (int step = 1; step < order.num_local; ++step) {
              const int peer = order.rank_at[step];
              if (!is_in(receivers, peer)) continue;
              ptx::cp_async_bulk_global_shared(
                  launch.area(peer, begin + static_cast<size_t>(piece) * PIECE_BYTES), buffer, PIECE_BYTES);
            }
          }
          ptx::cp_async_bulk_commit_group();
        });
    push.template complete<0>();
    done(static_cast<uint64_t>(flag));
  }
}

// There is room for the pieces of so many threads' warps.
constexpr int MOST_FORWARD_THREADS = 384;
template <class Config>
using ForwardStorage = PushCtaStorage<least(Config::NUM_THREADS, MOST_FORWARD_THREADS)>;

// A CTA that forwards: all of these warps but the last, which signals. Notes are flags of panels, whose blocks
// are counted.
template <class Config, HasNodes Params>
__device__ __forceinline__ void run_forward_cta(const RankLaunch& launch, const Params& params,
                                                uint8_t* smem_bytes) {
  using Storage = ForwardStorage<Config>;
  static_assert(2 * Config::KEY_BYTES % PUSH_CTA_PIECE_BYTES == 0);
  Storage& storage = *reinterpret_cast<Storage*>(smem_bytes);
  push_cta_init(storage);
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  if (warp < Storage::NUM_WARPS) {
    PushNotes notes(storage.signals, warp);
    BulkPush push(storage.push, warp);
    forward_keys(launch, params, push, [&](uint64_t note) { notes.add(note); });
    notes.end();
    return;
  }
  if (warp > Storage::NUM_WARPS) return;
  const auto& panels = params.panels;
  const auto run_of = [&](int flag) { return flag / panels.run_panels % panels.num_runs; };
  send_signals(
      storage.signals,
      [&](uint64_t note, uint32_t* expected) {
        const int flag = static_cast<int>(note);
        *expected =
            panels.num_blocks_of_panel(flag / panels.num_units(), run_of(flag), flag % panels.run_panels);
        return &params.comm.state->counts[flag];
      },
      [&](uint64_t note) {
        const int flag = static_cast<int>(note);
        const RankSet receivers =
            forward_receivers(params, flag / panels.num_units(), run_of(flag), flag % panels.run_panels);
        for (int step = 1; step < params.comm.order.num_local; ++step) {
          const int peer = params.comm.order.rank_at[step];
          if (is_in(receivers, peer)) launch.raise_flag_relaxed(peer, flag);
        }
      });
}

}  // namespace mk::ring_attention
