// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <map>
#include <optional>

namespace mk {

// Divides a range of offsets into allocations: the lowest free piece that is large enough is taken. Touches no
// memory; equal sequences of calls give equal offsets on every rank. Not thread-safe.
class SymmetricHeap {
 public:
  static constexpr size_t kAlignment = 256;

  // Adds `bytes`, a multiple of kAlignment, at the end of the range, which starts out empty.
  void extend(size_t bytes);
  // The offset of `bytes` rounded up to kAlignment; empty for 0 bytes, or when no free piece is large enough.
  std::optional<size_t> allocate(size_t bytes);
  // False when `offset` is not the start of an allocation.
  bool free(size_t offset);
  // Allocated, after rounding.
  size_t bytes_in_use() const { return bytes_in_use_; }
  size_t size() const { return size_; }

 private:
  void add_free(size_t offset, size_t bytes);

  std::map<size_t, size_t> free_;       // offset to bytes; no two touch
  std::map<size_t, size_t> allocated_;  // offset to bytes
  size_t size_ = 0;
  size_t bytes_in_use_ = 0;
};

}  // namespace mk
