// SPDX-License-Identifier: MIT
// Lists of tokens that travel between nodes, chunk by chunk, as the warps of the CTA that has the network deal
// with them: each chunk is put once it is whole, and told of when it has come.
#pragma once

#include "kernels/device/arrival_window.h"
#include "kernels/device/network_launch.cuh"
#include "kernels/ops/moe_routing/node_tokens.h"

namespace mk::moe {

// Has a flag of this rank's been raised? Then what it tells of is visible to the lane.
__device__ __forceinline__ bool has_flag(const RankLaunch& launch, const RankComm& comm, int index) {
  const uint64_t* const word = launch.flag(comm.rank, index);
  if (ptx::ld_relaxed_sys(word) < launch.epoch()) return false;
  ptx::ld_acquire_sys(word);
  return true;
}

// What goes to one peer; a lane has one.
struct PutList {
  int peer;
  uint32_t count;  // of things of equal size
  int64_t source;  // the first one's place in the bank, here
  int64_t target;  // and there
};

// By a whole warp: puts each chunk of the first `num_lists` lanes' lists once flag_of(peer, chunk) is up, with
// signal_of(chunk): chunk by chunk and of each to every peer in turn, without any that is late holding up those
// behind it. False: the launch is to end.
template <class FlagOf, class SignalOf>
__device__ __forceinline__ bool send_lists(const RankLaunch& launch, const NetworkLaunch& network,
                                           const RankComm& comm, const PacketChunks& chunks, int64_t bytes_each,
                                           int num_lists, const PutList& mine, DeviceObject object,
                                           FlagOf&& flag_of, SignalOf&& signal_of) {
  const int lane = threadIdx.x % 32;
  const int my_chunks = lane < num_lists ? chunks.num_chunks(mine.count) : 0;
  const int num_puts = __reduce_max_sync(~0u, my_chunks) * num_lists;
  ArrivalWindow window;
  Patience patience(launch, NETWORK_POLL_PAUSE_NS);
  while (window.first < num_puts) {
    const int idx = window.first + lane;
    const int chunk = idx / num_lists;
    const int turn = idx - chunk * num_lists;
    const int peer = __shfl_sync(~0u, mine.peer, turn);
    const uint32_t count = __shfl_sync(~0u, mine.count, turn);
    const int64_t source = __shfl_sync(~0u, mine.source, turn);
    const int64_t target = __shfl_sync(~0u, mine.target, turn);
    const bool is_sent = idx < num_puts && window.is_missing(lane) && chunk < chunks.num_chunks(count);
    const bool is_due = is_sent && has_flag(launch, comm, flag_of(peer, chunk));
    const bool is_none = idx < num_puts && window.is_missing(lane) && !is_sent;
    const uint32_t fresh = __ballot_sync(~0u, is_due || is_none);
    if (fresh != 0) {
      const int64_t begin = is_due ? chunks.begin(count, chunk) * bytes_each : 0;
      const int64_t bytes = is_due ? chunks.packets(count, chunk) * bytes_each : 0;
      if (!network.put(is_due, peer, network.area_address(source + begin), network.area_address(target + begin),
                       static_cast<uint32_t>(bytes), signal_of(chunk), DeviceRole::send))
        return false;
      window.add(fresh);
      patience.progressed();
      continue;
    }
    bool goes_on = true;
    if (lane == 0) {
      goes_on = patience.goes_on(
          {DeviceRole::send, object, peer, static_cast<uint64_t>(chunk), launch.epoch() - 1, launch.epoch()});
    }
    if (!__shfl_sync(~0u, static_cast<int>(goes_on), 0)) return false;
  }
  return true;
}

// By a whole warp: raises flag_of(peer, chunk) in this rank for each chunk that has come, in whatever order.
// The first `num_lists` lanes have a list each, of `num_mine` chunks that come under signal_of(peer, chunk).
template <class FlagOf, class SignalOf>
__device__ __forceinline__ void receive_lists(const RankLaunch& launch, const NetworkLaunch& network,
                                              const RankComm& comm, int num_lists, int my_peer, int num_mine,
                                              DeviceObject object, FlagOf&& flag_of, SignalOf&& signal_of) {
  const int lane = threadIdx.x % 32;
  ArrivalWindow mine;
  Patience patience(launch, NETWORK_POLL_PAUSE_NS);
  while (__any_sync(~0u, lane < num_lists && mine.first < num_mine)) {
    bool has_any = false;
    for (int i = 0; i < num_lists; ++i) {
      const int peer = __shfl_sync(~0u, my_peer, i);
      const ArrivalWindow window = {__shfl_sync(~0u, mine.first, i), __shfl_sync(~0u, mine.arrived, i)};
      const int num_chunks = __shfl_sync(~0u, num_mine, i);
      const int chunk = window.first + lane;
      const bool has_come =
          chunk < num_chunks && window.is_missing(lane) && network.take_signal(signal_of(peer, chunk));
      if (has_come) launch.raise_flag(comm.rank, flag_of(peer, chunk));
      const uint32_t fresh = __ballot_sync(~0u, has_come);
      has_any = has_any || fresh != 0;
      if (lane == i) mine.add(fresh);
    }
    if (has_any) {
      patience.progressed();
      continue;
    }
    const int waiting =
        __ffs(static_cast<int>(__ballot_sync(~0u, lane < num_lists && mine.first < num_mine))) - 1;
    const int chunk = __shfl_sync(~0u, mine.first, waiting);
    const int peer = __shfl_sync(~0u, my_peer, waiting);
    bool goes_on = true;
    if (lane == 0) {
      goes_on = patience.goes_on({DeviceRole::receive, object, peer, static_cast<uint64_t>(chunk),
                                  launch.epoch() - 1, launch.epoch()});
    }
    if (!__shfl_sync(~0u, static_cast<int>(goes_on), 0)) return;
  }
}

}  // namespace mk::moe
