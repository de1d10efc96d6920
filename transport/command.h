// SPDX-License-Identifier: MIT
// The one record that kernels and the proxy share. Compiles for host and device.
#pragma once

#include <cstddef>
#include <cstdint>

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

// Region id in the upper 16 bits, byte offset in the lower 48.
inline constexpr uint32_t kRegionOffsetBits = 48;
inline constexpr uint64_t region_address(uint32_t region, uint64_t offset) {
  return static_cast<uint64_t>(region) << kRegionOffsetBits | offset;
}
inline constexpr uint32_t region_of(uint64_t address) {
  return static_cast<uint32_t>(address >> kRegionOffsetBits);
}
inline constexpr uint64_t offset_of(uint64_t address) { return address & ((1ull << kRegionOffsetBits) - 1); }

}  // namespace mk
