// SPDX-License-Identifier: MIT
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace mk {

// Names objects for callers outside the library. A handle is an index and a generation, not an address: using
// it after removal finds nothing, also when the slot serves another object by then. Thread-safe; for a fork()
// it is held before and released after, in the child with abandon().
template <class Object>
class HandleTable {
 public:
  uint64_t insert(std::shared_ptr<Object> object) {
    std::lock_guard lock(mutex_);
    size_t index = 0;
    while (index < slots_.size() && slots_[index].object) ++index;
    if (index == slots_.size()) slots_.emplace_back();
    slots_[index].object = std::move(object);
    return static_cast<uint64_t>(++slots_[index].generation) << 24 | (index + 1);
  }
  std::shared_ptr<Object> find(uint64_t handle) const {
    std::lock_guard lock(mutex_);
    const size_t index = slot_of(handle);
    return index < slots_.size() ? slots_[index].object : nullptr;
  }
  // The object removed; null when the handle names none.
  std::shared_ptr<Object> remove(uint64_t handle) {
    std::lock_guard lock(mutex_);
    const size_t index = slot_of(handle);
    return index < slots_.size() ? std::move(slots_[index].object) : nullptr;
  }

  void hold() { mutex_.lock(); }
  void release() { mutex_.unlock(); }
  // Held: no handle finds anything any more. The objects stay, since there may be no taking them down.
  void abandon() {
    for (Slot& slot : slots_) {
      if (slot.object) abandoned_.push_back(std::move(slot.object));
    }
  }

 private:
  struct Slot {
    std::shared_ptr<Object> object;
    uint64_t generation = 0;
  };
  size_t slot_of(uint64_t handle) const {
    const size_t index = (handle & 0xffffff) - 1;
    if (index >= slots_.size() || slots_[index].generation != handle >> 24) return slots_.size();
    return index;
  }

  mutable std::mutex mutex_;
  std::vector<Slot> slots_;
  std::vector<std::shared_ptr<Object>> abandoned_;
};

}  // namespace mk
