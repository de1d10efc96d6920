// SPDX-License-Identifier: MIT
#include "command_fifo.h"

#include <atomic>
#include <cstring>

namespace mk {
namespace {

// Head, tail and turn live in plain words, since a GPU shares them.
template <class T>
std::atomic_ref<T> atomic(T& word) {
  static_assert(std::atomic_ref<T>::is_always_lock_free);
  return std::atomic_ref<T>(word);
}

}  // namespace

Result<std::unique_ptr<CommandFifo>> CommandFifo::create(uint32_t capacity, uint64_t first_index) {
  if (capacity == 0 || (capacity & (capacity - 1)) != 0) {
    return Status(MK_ERROR_INTERNAL,
                  format("command FIFO: expected a power of two as capacity, saw %u", capacity));
  }
  auto pages = SharedPages::make(FifoLayout::kSlots + size_t{capacity} * sizeof(Command));
  if (!pages.ok()) return pages.status();
  return std::unique_ptr<CommandFifo>(new CommandFifo(pages.take(), capacity, first_index));
}

CommandFifo::CommandFifo(std::shared_ptr<SharedPages> pages, uint32_t capacity, uint64_t first_index)
    : pages_(std::move(pages)),
      shared_(reinterpret_cast<Shared*>(pages_->data())),
      capacity_(capacity),
      next_(first_index) {
  shared_->head = shared_->tail = first_index;
  for (uint64_t index = first_index; index < first_index + capacity; ++index) {
    shared_->slots[index % capacity].turn = turn_of(index, capacity) - 1;
  }
}

bool CommandFifo::try_push(const Command& command) {
  uint64_t index = atomic(shared_->head).load(std::memory_order_relaxed);
  do {
    // Signed: tail may have passed an old view of head, which the exchange then refuses. Acquire: the consumer
    // has read the slot before we write it. Sequentially consistent, as in pop: a producer that says that it
    // found no room looks again, the proxy that made room looks whether one said so, and one of the two must
    // see the other.
    const uint64_t tail = atomic(shared_->tail).load(std::memory_order_seq_cst);
    if (static_cast<int64_t>(index - tail) >= static_cast<int64_t>(capacity_)) return false;
  } while (!atomic(shared_->head).compare_exchange_weak(index, index + 1, std::memory_order_relaxed));
  publish(index, command);
  return true;
}

uint64_t CommandFifo::claim() { return atomic(shared_->head).fetch_add(1, std::memory_order_relaxed); }

bool CommandFifo::try_publish(uint64_t index, const Command& command) {
  const uint64_t tail = atomic(shared_->tail).load(std::memory_order_acquire);
  if (static_cast<int64_t>(index - tail) >= static_cast<int64_t>(capacity_)) return false;
  publish(index, command);
  return true;
}

void CommandFifo::publish(uint64_t index, const Command& command) {
  Command& slot = shared_->slots[index % capacity_];
  std::memcpy(static_cast<void*>(&slot), &command, offsetof(Command, turn));
  // Sequentially consistent, beyond the release that the record needs: a CPU producer looks next whether the
  // proxy sleeps, the proxy announces its sleep and then looks at the turn, and one of the two must see the
  // other.
  atomic(slot.turn).store(turn_of(index, capacity_), std::memory_order_seq_cst);
}

bool CommandFifo::has_room() const {
  const uint64_t head = atomic(shared_->head).load(std::memory_order_relaxed);
  const uint64_t tail = atomic(shared_->tail).load(std::memory_order_acquire);
  return static_cast<int64_t>(head - tail) < static_cast<int64_t>(capacity_);
}

uint64_t CommandFifo::claimed() const { return atomic(shared_->head).load(std::memory_order_relaxed); }

std::optional<Command> CommandFifo::front() const {
  Command& slot = shared_->slots[next_ % capacity_];
  const uint32_t turn = turn_of(next_, capacity_);
  if (atomic(slot.turn).load(std::memory_order_seq_cst) != turn) return std::nullopt;
  Command command{};
  std::memcpy(static_cast<void*>(&command), &slot, offsetof(Command, turn));
  command.turn = turn;
  return command;
}

void CommandFifo::pop() { atomic(shared_->tail).store(++next_, std::memory_order_seq_cst); }

}  // namespace mk
