// SPDX-License-Identifier: MIT
// Warps post transport commands into the FIFO in pinned host memory. The protocol is that of
// transport/command_fifo.h: claim, wait for room, write, publish.
#pragma once

#include "kernels/device/command_queue.h"
#include "kernels/ptx/memory.cuh"

namespace mk {

// The slot's turn is written last: a proxy that sees it sees the rest.
__device__ __forceinline__ void publish_command(const CommandQueue& queue, uint64_t index,
                                                const Command& command) {
  static_assert(offsetof(Command, source) == 8 && offsetof(Command, target) == 16);
  std::byte* const slot = queue.pages + FifoLayout::kSlots + (index & (queue.capacity - 1)) * sizeof(Command);
  const uint64_t first = static_cast<uint64_t>(command.signal) << 32 |
                         static_cast<uint64_t>(command.peer) << 16 | static_cast<uint64_t>(command.kind);
  ptx::st_relaxed_sys_v2(reinterpret_cast<uint64_t*>(slot), first, command.source);
  ptx::st_relaxed_sys(reinterpret_cast<uint64_t*>(slot + offsetof(Command, target)), command.target);
  ptx::st_relaxed_sys(reinterpret_cast<uint32_t*>(slot + offsetof(Command, bytes)), command.bytes);
  ptx::st_release_sys(reinterpret_cast<uint32_t*>(slot + offsetof(Command, turn)),
                      turn_of(index, queue.capacity));
}

// By the whole warp: posts the commands of those lanes that have one, in the order of the lanes. What their
// sources hold must be visible to those lanes. While the FIFO is full, keep_waiting(tail), on one lane, says
// whether to go on; false: the launch is to end, and the FIFO with it, for commands that were claimed are
// missing in it.
template <class KeepWaiting>
__device__ __forceinline__ bool post_commands(const CommandQueue& queue, bool has_command,
                                              const Command& command, KeepWaiting&& keep_waiting) {
  const uint32_t lanes = __ballot_sync(~0u, has_command);
  if (lanes == 0) return true;
  const int lane = threadIdx.x % 32;
  uint64_t index = 0;
  if (lane == 0) index = ptx::atom_relaxed_gpu_add(&queue.state->head, __popc(lanes));
  index = __shfl_sync(~0u, index, 0) + __popc(lanes & ((1u << lane) - 1));
  bool is_pending = has_command;
  bool goes_on = true;
  // What some warp has read last will often do; the tail itself is on the other side of the bus.
  uint64_t tail = lane == 0 ? ptx::ld_acquire_gpu(&queue.state->tail_seen) : 0;
  while (true) {
    tail = __shfl_sync(~0u, tail, 0);
    __syncwarp();  // what lane 0 has acquired holds for all
    if (is_pending && index - tail < queue.capacity) {
      publish_command(queue, index, command);
      is_pending = false;
    }
    if (!__any_sync(~0u, is_pending) || !goes_on) return goes_on;
    if (lane == 0) {
      const uint64_t before = tail;
      tail = ptx::ld_acquire_sys(reinterpret_cast<const uint64_t*>(queue.pages + FifoLayout::kTail));
      if (tail != before) {
        ptx::red_release_gpu_max(&queue.state->tail_seen, tail);
      } else {
        goes_on = keep_waiting(tail);
      }
    }
    goes_on = __shfl_sync(~0u, static_cast<int>(goes_on), 0) != 0;
  }
}

}  // namespace mk
