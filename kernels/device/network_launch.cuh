// SPDX-License-Identifier: MIT
// The network's side of a launch, for the warps of the one CTA that has to do with it: puts, signals, entries
// of other nodes. Nobody else reads over the bus; what comes from the network is told to the others by flags.
#pragma once

#include "kernels/device/command_queue.cuh"
#include "kernels/device/patience.cuh"
#include "kernels/device/rank_launch.cuh"

namespace mk {

constexpr uint32_t NETWORK_POLL_PAUSE_NS = 200;

// All functions are called by whole warps.
class NetworkLaunch {
 public:
  __device__ NetworkLaunch(const RankLaunch& launch, const RankComm& comm) : launch_(launch), comm_(comm) {}

  // Place in the arena's bank of this epoch, for puts; the same at every rank.
  __device__ uint64_t area_address(size_t offset) const {
    return comm_.network.arena_address + launch_.bank() * comm_.bank_bytes + offset;
  }

  // Each lane with `has_put` sends `bytes` to `peer`, with a signal. The sources are visible to the warp.
  // False: the launch is to end.
  __device__ bool put(bool has_put, int peer, uint64_t source, uint64_t target, uint32_t bytes, int signal,
                      DeviceRole role) const {
    Command command{};
    command.kind = CommandKind::put;
    command.peer = static_cast<uint16_t>(peer);
    command.signal = signal_number(signal);
    command.source = source;
    command.target = target;
    command.bytes = bytes;
    Patience patience(launch_, NETWORK_POLL_PAUSE_NS);
    return post_commands(comm_.network.queue, has_put, command, [&](uint64_t tail) {
      return patience.goes_on({role, DeviceObject::command, comm_.rank, static_cast<uint64_t>(signal), tail,
                               ptx::ld_relaxed_gpu(&comm_.network.queue.state->head)});
    });
  }

  // Has a signal of this launch come? Then it is taken, and what its put has brought is visible to the lane.
  // Each is expected once a launch at most, by one role.
  __device__ bool take_signal(int signal) const {
    uint64_t* const taken = comm_.network.signals_taken + signal_number(signal);
    const auto* const counter = reinterpret_cast<const uint64_t*>(comm_.network.counters +
                                                                  CounterLayout::signal(signal_number(signal)));
    const uint64_t before = *taken;
    if (ptx::ld_relaxed_sys(counter) <= before) return false;
    ptx::ld_acquire_sys(counter);
    *taken = before + 1;
    return true;
  }

  // By one warp: RankLaunch::greet() of several nodes. A rank that finds a disagreement inside its node says so
  // once the network has its entry: its launch ends with that, and its proxy, and other nodes would wait for
  // the entry.
  __device__ void greet() const {
    launch_.enter();
    if (!send_entry()) return;
    relay_entries();
    launch_.wait_entries([this] { wait_until_sent(); });
  }

  // By one warp, after all puts of the launch were posted: until the network no longer reads their sources.
  __device__ void wait_for_puts() const;

 private:
  __device__ uint32_t signal_number(int signal) const {
    return static_cast<uint32_t>(launch_.bank()) * kSignalsPerBank + static_cast<uint32_t>(signal);
  }
  __device__ bool send_entry() const;
  __device__ void relay_entries() const;
  __device__ void forward_entry(int source) const;
  __device__ void wait_until_sent() const;

  const RankLaunch& launch_;
  const RankComm& comm_;
};

__device__ inline bool NetworkLaunch::send_entry() const {
  constexpr int NUM_WORDS = sizeof(EntryRecord) / 8;
  static_assert(NUM_WORDS <= 32 && offsetof(EntryRecord, epoch) == 0);
  const ControlLayout layout{comm_.nranks};
  const int lane = threadIdx.x % 32;
  const size_t outbox = layout.outbox(launch_.bank());
  const auto* const words = reinterpret_cast<const uint64_t*>(&comm_.entry);
  auto* const slot = reinterpret_cast<uint64_t*>(comm_.memory[comm_.rank] + outbox);
  if (lane < NUM_WORDS) ptx::st_relaxed_sys(slot + lane, lane == 0 ? launch_.epoch() : words[lane]);
  __syncwarp();
  // Before the network reads it: the put is published by lanes that have not written it all.
  ptx::fence_acq_rel_sys();
  __syncwarp();
  const bool has_put = lane < comm_.order.num_rail_peers;
  return put(has_put, has_put ? comm_.order.rail_peers[lane] : 0, comm_.network.control_address + outbox,
             comm_.network.control_address + layout.inbox(launch_.bank(), comm_.rank), sizeof(EntryRecord),
             comm_.rank, DeviceRole::entry);
}

// Copies a record that a put has brought to the slots of this node's ranks; one lane.
__device__ inline void NetworkLaunch::forward_entry(int source) const {
  constexpr int NUM_WORDS = sizeof(EntryRecord) / 8;
  const auto* const inbox = reinterpret_cast<const uint64_t*>(
      comm_.memory[comm_.rank] + ControlLayout{comm_.nranks}.inbox(launch_.bank(), source));
  for (int i = 0; i < comm_.order.num_local; ++i) {
    EntryRecord* const entry = launch_.entry(comm_.order.rank_at[i], source);
    auto* const slot = reinterpret_cast<uint64_t*>(entry);
    for (int word = 1; word < NUM_WORDS; ++word) {
      ptx::st_relaxed_sys(slot + word, ptx::ld_relaxed_sys(inbox + word));
    }
    ptx::st_release_sys(&entry->epoch, ptx::ld_relaxed_sys(inbox));
  }
}

// A lane for each rank that this one relays for.
__device__ inline void NetworkLaunch::relay_entries() const {
  const int lane = threadIdx.x % 32;
  bool is_pending = lane < comm_.order.num_relayed;
  const int source = is_pending ? comm_.order.relayed[lane] : 0;
  int num_looks = 0;
  while (__any_sync(~0u, is_pending)) {
    const bool has_come = is_pending && take_signal(source);
    if (has_come) forward_entry(source);
    is_pending = is_pending && !has_come;
    __syncwarp();
    __nanosleep(NETWORK_POLL_PAUSE_NS);
    if (++num_looks % POLLS_PER_LOOK == 0 && __any_sync(~0u, lane == 0 && launch_.stopped())) return;
  }
}

// By one lane: until nothing that this rank has posted is under way. Puts complete in any order and are only
// counted, so that nothing less says that the entry has gone.
__device__ inline void NetworkLaunch::wait_until_sent() const {
  const auto* const completed =
      reinterpret_cast<const uint64_t*>(comm_.network.counters + CounterLayout::kCompleted);
  Patience patience(launch_, NETWORK_POLL_PAUSE_NS);
  while (true) {
    const uint64_t seen = ptx::ld_acquire_sys(completed);  // before what other warps go on posting
    const uint64_t posted = ptx::ld_relaxed_gpu(&comm_.network.queue.state->head);
    if (seen >= posted) return;
    if (!patience.goes_on({DeviceRole::entry, DeviceObject::put, comm_.rank, posted, seen, posted})) return;
  }
}

__device__ inline void NetworkLaunch::wait_for_puts() const {
  const auto* const completed =
      reinterpret_cast<const uint64_t*>(comm_.network.counters + CounterLayout::kCompleted);
  const uint64_t posted = ptx::ld_relaxed_gpu(&comm_.network.queue.state->head);
  if (threadIdx.x % 32 == 0) {
    Patience patience(launch_, NETWORK_POLL_PAUSE_NS);
    uint64_t seen = ptx::ld_relaxed_sys(completed);
    while (seen < posted) {
      if (!patience.goes_on({DeviceRole::send, DeviceObject::put, comm_.rank, posted, seen, posted})) break;
      const uint64_t before = seen;
      seen = ptx::ld_relaxed_sys(completed);
      if (seen != before) patience.progressed();
    }
    ptx::ld_acquire_sys(completed);
  }
  __syncwarp();
}

}  // namespace mk
