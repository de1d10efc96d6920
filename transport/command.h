// SPDX-License-Identifier: MIT
// The one record that kernels and the proxy share. Compiles for host and device.
#pragma once

#include <cstddef>
#include <cstdint>

namespace mk {

enum class CommandKind : uint8_t {
  put = 1,     // bytes from a local region to a region of a peer
  signal = 2,  // no bytes: only the signal
  stop = 255,  // ends the proxy
};

// Signals: 64-bit counters at the receiver, kSignalsPerBank in each of the two banks of an epoch's parity. A command
// with a signal adds one to it, after the bytes of the same command are visible to whoever sees the count.
inline constexpr uint32_t kSignalsPerBank = 1u << 15;
inline constexpr uint32_t kNumSignals = 2 * kSignalsPerBank;
inline constexpr uint32_t kNoSignal = 0xffffffffu;

struct alignas(32) Command {
  CommandKind kind;
  uint8_t reserved;
  uint16_t peer;        // global rank
  uint32_t signal;      // bank * kSignalsPerBank + index, or kNoSignal
  uint64_t source;      // region id << 48 | byte offset
  uint64_t target;      // region id << 48 | byte offset, in the peer's region of that id
  uint32_t bytes;
  uint32_t turn;        // the FIFO's: lap number + 1 of the slot, stored last, with release order
};
static_assert(sizeof(Command) == 32 && offsetof(Command, source) == 8 && offsetof(Command, turn) == 28);

inline constexpr uint64_t region_address(uint32_t region, uint64_t offset) {
  return static_cast<uint64_t>(region) << 48 | offset;
}

}  // namespace mk
