// SPDX-License-Identifier: MIT
// The 32 bits that travel with an RDMA write, for rc and srd alike. Nothing in them counts: a slot is one of
// the sender's kCreditsPerPeer, used again only after the receiver has acknowledged it, so no number of puts
// overflows anything.
//
//   put      [31..26] slot   [25..10] signal   [9..0] pieces: immediates that belong to the slot, 1 to 1023
//   control  [31..28] kind   [27..10] payload  [9..0] 0
#pragma once

#include <cstdint>

#include "../command.h"
#include "../transport.h"

namespace mk::verbs {

inline constexpr uint32_t kMaxPieces = 1023;

static_assert(kCreditsPerPeer == 64, "a slot has 6 bits, and an acknowledgement 8 groups of 8");
static_assert(kNumSignals == 1u << 16, "a signal has 16 bits");

enum class ControlKind : uint32_t {
  acknowledge = 1,  // payload: group of slots (3 bits) << 8 | mask of slots in it; these may be used again
  bye = 2,          // the sender leaves, and that is no failure
  refused = 3,      // the sender's puts to the receiver fail: its memory refuses them
};

struct PutImmediate {
  uint32_t slot;
  uint32_t signal;
  uint32_t pieces;
};

struct ControlImmediate {
  ControlKind kind;
  uint32_t payload;
};

inline constexpr uint32_t encode(const PutImmediate& put) {
  return put.slot << 26 | put.signal << 10 | put.pieces;
}
inline constexpr uint32_t encode(const ControlImmediate& control) {
  return static_cast<uint32_t>(control.kind) << 28 | control.payload << 10;
}
inline constexpr bool is_control(uint32_t immediate) { return (immediate & kMaxPieces) == 0; }
inline constexpr PutImmediate decode_put(uint32_t immediate) {
  return {immediate >> 26, immediate >> 10 & (kNumSignals - 1), immediate & kMaxPieces};
}
inline constexpr ControlImmediate decode_control(uint32_t immediate) {
  return {static_cast<ControlKind>(immediate >> 28), immediate >> 10 & 0x3ffff};
}

inline constexpr ControlImmediate acknowledge(uint32_t group, uint32_t mask) {
  return {ControlKind::acknowledge, group << 8 | mask};
}
inline constexpr uint64_t acknowledged_slots(const ControlImmediate& control) {
  return static_cast<uint64_t>(control.payload & 0xff) << (8 * (control.payload >> 8 & 7));
}

}  // namespace mk::verbs
