// SPDX-License-Identifier: MIT
// What a kernel of a communicator of several nodes is given of the network, and who is who in it. Host and
// device.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/device/command_queue.h"
#include "kernels/protocol.h"

namespace mk {

// Ranks of a communicator whose operators run on GPUs, at most: a lane each for the entries.
constexpr int MAX_GPU_RANKS = 32;
// Of the first puts from a region (CudaRank::prime()), behind the signals of entries.
constexpr uint32_t PRIME_SIGNAL = MAX_GPU_RANKS;
static_assert(PRIME_SIGNAL < kEntrySignals);

// Ranks in the order in which a rank turns to them: itself, the others of its node, those of the next nodes.
struct RankOrder {
  uint8_t rank_at[MAX_GPU_RANKS];
  int num_local;  // the first ones are this node's
  // To each other node a rank speaks through its rail peer there; what ranks elsewhere send to this node comes
  // to the one rank that relays for them.
  int num_rail_peers;
  uint8_t rail_peers[MAX_GPU_RANKS];
  int num_relayed;
  uint8_t relayed[MAX_GPU_RANKS];  // ranks elsewhere that this rank relays for, nearest first
};

inline RankOrder make_rank_order(const TopologyView& view) {
  RankOrder order{};
  order.num_local = view.local_nranks();
  for (int position = 0; position < view.nranks; ++position) {
    const int rank = view.rotated(position);
    order.rank_at[position] = static_cast<uint8_t>(rank);
    if (!view.is_local(rank) && view.rail_peer(rank, view.node()) == view.rank) {
      order.relayed[order.num_relayed++] = static_cast<uint8_t>(rank);
    }
  }
  for (int step = 1; step < view.num_nodes; ++step) {
    const int node = (view.node() + step) % view.num_nodes;
    order.rail_peers[order.num_rail_peers++] = static_cast<uint8_t>(view.rail_peer(view.rank, node));
  }
  return order;
}

// In device memory, zero at the start.
struct NetworkState {
  CommandQueueState queue;
  uint64_t signals_taken[kNumSignals];  // how often each signal has been taken
};

struct NetworkComm {
  CommandQueue queue;
  const std::byte* counters;  // in host memory, as this device addresses them: CounterLayout
  uint64_t* signals_taken;
  uint64_t control_address;  // region addresses of the control block and of the arena
  uint64_t arena_address;
};

}  // namespace mk
