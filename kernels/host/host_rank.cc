// SPDX-License-Identifier: MIT
#include "host_rank.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>

#include "hooks.h"

namespace mk {

std::atomic<const HostHooks*> host_hooks{nullptr};

HostRank::HostRank(const Topology& topology, std::unique_ptr<SymmetricMemory> memory, Endpoint* endpoint)
    : arrays_(topology),
      memory_(std::move(memory)),
      endpoint_(endpoint),
      layout_{topology.nranks},
      signal_base_(endpoint ? kNumSignals : 0),
      sent_(topology.nranks) {}

Status HostRank::set_up(Deadline deadline) {
  Result<size_t> offset = memory_->grow(layout_.bytes(), deadline);
  if (!offset.ok()) return offset.status();
  if (endpoint_ == nullptr) return {};
  Result<uint32_t> region = endpoint_->register_region(memory_->local(0), layout_.bytes(), deadline);
  if (!region.ok()) return region.status();
  control_region_ = region.value();
  return {};
}

Result<Arena> HostRank::add_arena(size_t bank_bytes, Deadline deadline) {
  Arena arena;
  arena.bank_bytes = static_cast<size_t>(round_up(static_cast<int64_t>(bank_bytes), 4096));
  Result<size_t> offset = memory_->grow(2 * arena.bank_bytes, deadline);
  if (!offset.ok()) return offset.status();
  arena.offset = offset.value();
  if (endpoint_ != nullptr) {
    Result<uint32_t> region =
        endpoint_->register_region(memory_->local(arena.offset), 2 * arena.bank_bytes, deadline);
    if (!region.ok()) return region.status();
    arena.region = region.value();
  }
  return arena;
}

void HostRank::ring(int local_rank) const {
  std::atomic_ref<uint32_t> bell = half_word(local_rank, ControlLayout::kDoorbell);
  bell.fetch_add(1, std::memory_order_seq_cst);
  if (half_word(local_rank, ControlLayout::kSleepers).load(std::memory_order_seq_cst) == 0) return;
  // Not FUTEX_PRIVATE: the sleepers may be another process'.
  syscall(SYS_futex, control(local_rank, ControlLayout::kDoorbell), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

uint32_t HostRank::doorbell() const {
  return half_word(view().local_rank(), ControlLayout::kDoorbell).load(std::memory_order_seq_cst);
}

void HostRank::sleep(uint32_t seen, int milliseconds) const {
  const int self = view().local_rank();
  std::atomic_ref<uint32_t> sleepers = half_word(self, ControlLayout::kSleepers);
  sleepers.fetch_add(1, std::memory_order_seq_cst);
  const timespec timeout{milliseconds / 1000, milliseconds % 1000 * 1000000L};
  syscall(SYS_futex, control(self, ControlLayout::kDoorbell), FUTEX_WAIT, seen, &timeout, nullptr, 0);
  sleepers.fetch_sub(1, std::memory_order_seq_cst);
}

bool HostRank::signal_arrived(int bank, int index) const {
  const uint32_t signal = signal_index(bank, index);
  return endpoint_->signal(signal) > signal_base_[signal];
}

void HostRank::rebase_signals() {
  for (uint32_t signal = 0; signal < signal_base_.size(); ++signal)
    signal_base_[signal] = endpoint_->signal(signal);
}

uint64_t HostRank::signals_received() const {
  uint64_t total = 0;
  for (uint32_t signal = 0; signal < signal_base_.size(); ++signal) total += endpoint_->signal(signal);
  return total;
}

}  // namespace mk
