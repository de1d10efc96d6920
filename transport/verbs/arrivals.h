// SPDX-License-Identifier: MIT
// The receiving end of one peer's puts: counts the immediates of each slot, in whatever order they come.
#pragma once

#include <array>
#include <cstdint>

#include "../../lib/status.h"
#include "immediate.h"

namespace mk::verbs {

class Arrivals {
 public:
  // One immediate of a put. True: it was the last one of its slot, all bytes of the put are here, and its
  // signal is to be published; the slot is free for the sender once it is told so. An error: the sender breaks
  // the rules.
  Result<bool> count(const PutImmediate& put);
  // Whether the one counted last was the first of its slot.
  bool was_first(const PutImmediate& put) const {
    return put.pieces == 1 || slots_[put.slot % kCreditsPerPeer].arrived == 1;
  }

 private:
  struct Slot {
    uint16_t arrived = 0;
    uint16_t pieces = 0;
    uint32_t signal = 0;
  };
  std::array<Slot, kCreditsPerPeer> slots_{};
};

}  // namespace mk::verbs
