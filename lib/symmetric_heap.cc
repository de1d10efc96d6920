// SPDX-License-Identifier: MIT
#include "symmetric_heap.h"

#include <cstdint>
#include <iterator>

namespace mk {

void SymmetricHeap::extend(size_t bytes) {
  bytes -= bytes % kAlignment;
  if (bytes == 0) return;
  add_free(size_, bytes);
  size_ += bytes;
}

std::optional<size_t> SymmetricHeap::allocate(size_t bytes) {
  if (bytes == 0 || bytes > SIZE_MAX - kAlignment) return std::nullopt;
  bytes = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  for (auto piece = free_.begin(); piece != free_.end(); ++piece) {
    const auto [offset, available] = *piece;
    if (available < bytes) continue;
    free_.erase(piece);
    if (available > bytes) free_[offset + bytes] = available - bytes;
    allocated_[offset] = bytes;
    bytes_in_use_ += bytes;
    return offset;
  }
  return std::nullopt;
}

bool SymmetricHeap::free(size_t offset) {
  const auto found = allocated_.find(offset);
  if (found == allocated_.end()) return false;
  const size_t bytes = found->second;
  allocated_.erase(found);
  bytes_in_use_ -= bytes;
  add_free(offset, bytes);
  return true;
}

// Joins the piece with the free ones on both sides.
void SymmetricHeap::add_free(size_t offset, size_t bytes) {
  const auto after = free_.lower_bound(offset);
  if (after != free_.begin()) {
    const auto before = std::prev(after);
    if (before->first + before->second == offset) {
      offset = before->first;
      bytes += before->second;
      free_.erase(before);
    }
  }
  if (after != free_.end() && offset + bytes == after->first) {
    bytes += after->second;
    free_.erase(after);
  }
  free_[offset] = bytes;
}

}  // namespace mk
