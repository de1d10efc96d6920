// SPDX-License-Identifier: MIT
// What was worked out for a call, kept for the next ones that differ from it in addresses only.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "kernels/gemm_call.h"

namespace mk {

// The last CAPACITY kinds of calls seen, found by everything of a call but its addresses. A value stays where
// it is until insert() or clear().
template <class Value, size_t CAPACITY = 64>
class CallCache {
 public:
  // Null: not there.
  Value* find(const GemmCall& call) const {
    const uint64_t hash = hash_of(call);
    for (size_t i = 0; i < CAPACITY; ++i) {
      if (hashes_[i] == hash && entries_[i] && equal_but_addresses(entries_[i]->call, call))
        return &entries_[i]->value;
    }
    return nullptr;
  }

  // In place of the oldest, where there is no room.
  Value& insert(const GemmCall& call, Value value) {
    const size_t at = next_++ % CAPACITY;
    hashes_[at] = hash_of(call);
    entries_[at] = std::make_unique<Entry>(Entry{call, std::move(value)});
    return entries_[at]->value;
  }

  void clear() {
    for (auto& entry : entries_) entry.reset();
  }

 private:
  struct Entry {
    GemmCall call;
    Value value;
  };

  // Of the sizes, which tell most calls apart: the hashes lie together, and a search reads little else.
  static uint64_t hash_of(const GemmCall& call) {
    constexpr uint64_t kFactor = 0x9e3779b97f4a7c15ull;
    uint64_t hash = static_cast<uint64_t>(call.op) + 16 * call.mode + 64 * call.accumulate;
    for (const int64_t size : {call.m, call.n, call.k, call.ldc})
      hash = (hash ^ static_cast<uint64_t>(size)) * kFactor;
    return hash;
  }

  std::array<uint64_t, CAPACITY> hashes_{};
  std::array<std::unique_ptr<Entry>, CAPACITY> entries_;
  size_t next_ = 0;
};

}  // namespace mk
