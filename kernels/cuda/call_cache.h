// SPDX-License-Identifier: MIT
// What was worked out for a call, kept for the next ones that differ from it in addresses only.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "kernels/gemm_call.h"
#include "kernels/ring_attention_call.h"

namespace mk {

// Of a call's sizes, which tell most calls apart.
inline std::array<int64_t, 5> hashed_sizes(const GemmCall& call) {
  return {int64_t{call.op} + 16 * call.mode + 64 * call.accumulate, call.m, call.n, call.k, call.ldc};
}
inline std::array<int64_t, 5> hashed_sizes(const RingAttentionCall& call) {
  return {int64_t{call.op} + 16 * call.causal, call.batch, call.seq, int64_t{call.heads} << 32 | call.kv_heads,
          call.dim};
}

// The last CAPACITY kinds of calls seen, found by everything of a call but its addresses. A value stays where
// it is until insert() or clear().
template <class Call, class Value, size_t CAPACITY = 64>
class CallCache {
 public:
  // Null: not there.
  Value* find(const Call& call) const {
    const uint64_t hash = hash_of(call);
    for (size_t i = 0; i < CAPACITY; ++i) {
      if (hashes_[i] == hash && entries_[i] && equal_but_addresses(entries_[i]->call, call))
        return &entries_[i]->value;
    }
    return nullptr;
  }

  // In place of the oldest, where there is no room.
  Value& insert(const Call& call, Value value) {
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
    Call call;
    Value value;
  };

  // The hashes lie together, and a search reads little else.
  static uint64_t hash_of(const Call& call) {
    constexpr uint64_t kFactor = 0x9e3779b97f4a7c15ull;
    uint64_t hash = 0;
    for (const int64_t size : hashed_sizes(call)) hash = (hash ^ static_cast<uint64_t>(size)) * kFactor;
    return hash;
  }

  std::array<uint64_t, CAPACITY> hashes_{};
  std::array<std::unique_ptr<Entry>, CAPACITY> entries_;
  size_t next_ = 0;
};

}  // namespace mk
