// SPDX-License-Identifier: MIT
// The GPU end of the command FIFO (transport/command_fifo.h): what kernels are given to post commands.
#pragma once

#include <cstddef>
#include <cstdint>

#include "transport/command.h"

namespace mk {

// In device memory, zero at the start. The head is here and not with the slots: a kernel's count of commands
// would cross the bus for every claim, and the host has no use for it.
struct CommandQueueState {
  uint64_t head;                    // commands claimed
  alignas(128) uint64_t tail_seen;  // commands taken, as far as anyone has read it
};

struct CommandQueue {
  std::byte* pages;  // the FIFO's, in host memory, as this device addresses them
  CommandQueueState* state;
  uint32_t capacity;  // a power of two
};

}  // namespace mk
