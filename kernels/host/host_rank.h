// SPDX-License-Identifier: MIT
// What a rank of the host executor keeps between launches: its control block and those of its node, the
// doorbell, the counters of the network.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "../../lib/symmetric_memory.h"
#include "../../lib/topology.h"
#include "../../transport/endpoint.h"
#include "../protocol.h"
#include "../topology_arrays.h"

namespace mk {

// A piece of symmetric memory with two banks of receive areas, registered with the transport.
struct Arena {
  size_t offset = 0;
  size_t bank_bytes = 0;
  uint32_t region = 0;
};

class HostRank {
 public:
  HostRank(const Topology& topology, std::unique_ptr<SymmetricMemory> memory, Endpoint* endpoint);

  // Allocates the control block. Collective.
  Status set_up(Deadline deadline);
  // Appends an arena. Collective.
  Result<Arena> add_arena(size_t bank_bytes, Deadline deadline);

  const TopologyView& view() const { return arrays_.view(); }
  SymmetricMemory& memory() { return *memory_; }
  Endpoint* endpoint() { return endpoint_; }

  std::byte* control(int local_rank, size_t offset) const { return memory_->peer(local_rank, offset); }
  uint64_t control_address(size_t offset) const { return region_address(control_region_, offset); }
  const ControlLayout& layout() const { return layout_; }
  std::atomic_ref<uint64_t> flag(int local_rank, int bank, int index) const {
    return word(local_rank, layout_.flag(bank, index));
  }
  EntryRecord* entry(int local_rank, int bank, int source) const {
    return reinterpret_cast<EntryRecord*>(control(local_rank, layout_.entry(bank, source)));
  }

  // Tells the threads of a rank of the node that something here has changed; of this rank, when none is given.
  void ring(int local_rank) const;
  void ring() const { ring(view().local_rank()); }
  // The doorbell's count, to be read before looking; sleep returns at once when it has moved on, else at
  // a ring or after `milliseconds`.
  uint32_t doorbell() const;
  void sleep(uint32_t seen, int milliseconds) const;

  // Signals: cumulative counters at this rank. A signal is expected once a launch at most; taking it moves its
  // base.
  bool signal_arrived(int bank, int index) const;
  void take_signal(int bank, int index) { ++signal_base_[signal_index(bank, index)]; }
  void rebase_signals();
  uint64_t signals_received() const;
  std::atomic<uint64_t>& signals_sent(int peer) { return sent_[peer]; }
  const std::atomic<uint64_t>& signals_sent(int peer) const { return sent_[peer]; }
  static uint32_t signal_index(int bank, int index) {
    return static_cast<uint32_t>(bank) * kSignalsPerBank + index;
  }

 private:
  std::atomic_ref<uint64_t> word(int local_rank, size_t offset) const {
    return std::atomic_ref<uint64_t>(*reinterpret_cast<uint64_t*>(control(local_rank, offset)));
  }
  std::atomic_ref<uint32_t> half_word(int local_rank, size_t offset) const {
    return std::atomic_ref<uint32_t>(*reinterpret_cast<uint32_t*>(control(local_rank, offset)));
  }

  const TopologyArrays arrays_;
  std::unique_ptr<SymmetricMemory> memory_;
  Endpoint* endpoint_;
  ControlLayout layout_;
  uint32_t control_region_ = 0;
  std::vector<uint64_t> signal_base_;
  std::vector<std::atomic<uint64_t>> sent_;
};

}  // namespace mk
