// SPDX-License-Identifier: MIT
#include "arrivals.h"

namespace mk::verbs {

Result<bool> Arrivals::count(const PutImmediate& put) {
  Slot& slot = slots_[put.slot % kCreditsPerPeer];
  if (slot.arrived == 0) {
    slot.pieces = static_cast<uint16_t>(put.pieces);
    slot.signal = put.signal;
  } else if (slot.pieces != put.pieces || slot.signal != put.signal) {
    return Status(MK_ERROR_NETWORK,
                  format("slot %u: %u immediates for signal %u were announced, now %u for signal %u", put.slot,
                         slot.pieces, slot.signal, put.pieces, put.signal));
  }
  if (++slot.arrived < slot.pieces) return false;
  slot.arrived = 0;
  return true;
}

}  // namespace mk::verbs
