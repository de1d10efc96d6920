// SPDX-License-Identifier: MIT
// The one record that kernels and the proxy share. Compiles for host and device.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../kernels/device/host_device.h"

namespace mk {

enum class CommandKind : uint8_t {
  put = 1,     // bytes from a local region to a region of a peer, then the signal if there is one
  signal = 2,  // only the signal: source, target and bytes are zero
};

// Signals: 64-bit counters at the receiver, kSignalsPerBank in each of the two banks of an epoch's parity. A
// command with a signal adds one to it, after the bytes of the same command are visible to whoever sees the
// count.
inline constexpr uint32_t kSignalsPerBank = 1u << 15;
inline constexpr uint32_t kNumSignals = 2 * kSignalsPerBank;
inline constexpr uint32_t kNoSignal = 0xffffffffu;

struct alignas(32) Command {
  CommandKind kind;
  uint8_t reserved;
  uint16_t peer;    // global rank, on another node
  uint32_t signal;  // bank * kSignalsPerBank + index, or kNoSignal
  uint64_t source;  // region_address in this rank's region
  uint64_t target;  // region_address in the peer's region of that id
  uint32_t bytes;
  uint32_t turn;  // the FIFO's: lap number + 1 of the slot, stored last, with release order
};
static_assert(sizeof(Command) == 32 && alignof(Command) == 32);
static_assert(offsetof(Command, peer) == 2 && offsetof(Command, signal) == 4 &&
              offsetof(Command, source) == 8 && offsetof(Command, target) == 16 &&
              offsetof(Command, bytes) == 24 && offsetof(Command, turn) == 28);

// The pages of a command FIFO, which a GPU may share: the count of commands that CPU threads have claimed, the
// count of those that the proxy has taken, the slots.
struct FifoLayout {
  static constexpr size_t kHead = 0;
  static constexpr size_t kTail = 128;
  static constexpr size_t kSlots = 256;
};
// The slot of command `index` is index mod capacity; its turn is the number of the lap, from 1.
MK_HOST_DEVICE constexpr uint32_t turn_of(uint64_t index, uint32_t capacity) {
  return static_cast<uint32_t>(index / capacity + 1);
}

// The pages of a rank's counters, likewise: the signals, and behind them the count of commands whose source the
// network no longer reads.
struct CounterLayout {
  MK_HOST_DEVICE static constexpr size_t signal(uint32_t index) { return size_t{index} * sizeof(uint64_t); }
  static constexpr size_t kCompleted = size_t{kNumSignals} * sizeof(uint64_t);
  static constexpr size_t kBytes = kCompleted + 128;
};

// Region id in the upper 16 bits, byte offset in the lower 48.
inline constexpr uint32_t kRegionOffsetBits = 48;
MK_HOST_DEVICE constexpr uint64_t region_address(uint32_t region, uint64_t offset) {
  return static_cast<uint64_t>(region) << kRegionOffsetBits | offset;
}
MK_HOST_DEVICE constexpr uint32_t region_of(uint64_t address) {
  return static_cast<uint32_t>(address >> kRegionOffsetBits);
}
MK_HOST_DEVICE constexpr uint64_t offset_of(uint64_t address) {
  return address & ((1ull << kRegionOffsetBits) - 1);
}

}  // namespace mk
