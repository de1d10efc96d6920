// SPDX-License-Identifier: MIT
// The queue between the producers of commands (threads of the host executor, warps of a kernel) and the proxy.
//
// Protocol, the same for CPU threads and GPU warps:
//   claim    add one to head; the old value is the index of the command. Its slot is index mod capacity. A GPU
//            keeps the head in its own memory (kernels/device/command_fifo.cuh): a FIFO has producers of one
//            kind.
//   wait     until index - tail < capacity: the slot's previous command has been taken. A CPU producer looks
//            before it claims (try_push), so that it never owns a slot it cannot fill.
//   write    the first 28 bytes of the slot.
//   publish  store turn = index / capacity + 1 with release order (system scope on a GPU).
// The consumer takes slots in order, each when its turn has come, and publishes tail with release order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include "../lib/status.h"
#include "command.h"
#include "shared_pages.h"

namespace mk {

class CommandFifo {
 public:
  // `capacity` is a power of two. `first_index` is where counting starts: other than 0 only in tests of the
  // wrap.
  static Result<std::unique_ptr<CommandFifo>> create(uint32_t capacity, uint64_t first_index = 0);
  CommandFifo(const CommandFifo&) = delete;
  CommandFifo& operator=(const CommandFifo&) = delete;

  // Producers, any thread. try_push: false when the FIFO is full.
  bool try_push(const Command& command);
  // What a kernel does: claims unconditionally, then tries to publish until the slot is free.
  uint64_t claim();
  bool try_publish(uint64_t index, const Command& command);
  // Whether try_push would succeed now.
  bool has_room() const;
  // Commands claimed so far.
  uint64_t claimed() const;

  // The consumer, one thread: the next command, if its turn has come, and the step past it.
  std::optional<Command> front() const;
  void pop();

  // What is shared with a GPU, as FifoLayout says.
  const std::shared_ptr<SharedPages>& pages() const { return pages_; }
  uint32_t capacity() const { return capacity_; }

 private:
  struct Shared {
    alignas(128) uint64_t head;
    alignas(128) uint64_t tail;
    alignas(128) Command slots[1];
  };
  static_assert(offsetof(Shared, head) == FifoLayout::kHead && offsetof(Shared, tail) == FifoLayout::kTail &&
                offsetof(Shared, slots) == FifoLayout::kSlots);

  CommandFifo(std::shared_ptr<SharedPages> pages, uint32_t capacity, uint64_t first_index);
  void publish(uint64_t index, const Command& command);

  const std::shared_ptr<SharedPages> pages_;
  Shared* shared_;
  uint32_t capacity_;
  uint64_t next_;  // the consumer's own copy of tail
};

}  // namespace mk
