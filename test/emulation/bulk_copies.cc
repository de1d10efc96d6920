// SPDX-License-Identifier: MIT
#include "bulk_copies.h"

#include <cstring>
#include <utility>

namespace emulation {

void BulkCopies::load(void* to, const void* from, size_t num_bytes, const uint64_t* barrier) {
  loads_.push_back(ask(to, from, num_bytes));
  loads_.back().barrier = barrier;
}

void BulkCopies::complete_loads(const uint64_t* barrier) {
  std::erase_if(loads_, [&](Copy& copy) {
    if (copy.barrier != barrier) return false;
    copy.read();
    copy.write();
    return true;
  });
}

void BulkCopies::store(void* to, const void* from, size_t num_bytes) {
  stores_.push_back(ask(to, from, num_bytes));
  stores_.back().group = num_groups_;
}

void BulkCopies::add(void* to, const void* from, size_t num_bytes) {
  Copy copy{to, from, std::vector<std::byte>(num_bytes)};
  copy.adds = true;
  copy.group = num_groups_;
  stores_.push_back(std::move(copy));
}

void BulkCopies::complete_reads(uint64_t num_pending) {
  for (Copy& copy : stores_) {
    if (copy.group + num_pending < num_groups_ && !copy.is_read) copy.read();
  }
}

void BulkCopies::complete_stores(uint64_t num_pending) {
  complete_reads(num_pending);
  std::erase_if(stores_, [&](const Copy& copy) {
    if (copy.group + num_pending >= num_groups_) return false;
    copy.write();
    return true;
  });
}

BulkCopies::Copy BulkCopies::ask(void* to, const void* from, size_t num_bytes) {
  constexpr int kNotWrittenYet = 0xa5;
  Copy copy{to, from, std::vector<std::byte>(num_bytes)};
  std::memcpy(copy.bytes.data(), from, num_bytes);
  std::memset(to, kNotWrittenYet, num_bytes);
  return copy;
}

void BulkCopies::Copy::read() {
  std::memcpy(bytes.data(), from, bytes.size());
  is_read = true;
}
void BulkCopies::Copy::write() const {
  if (!adds) {
    std::memcpy(to, bytes.data(), bytes.size());
    return;
  }
  for (size_t i = 0; i < bytes.size() / sizeof(float); ++i) {
    float summand = 0;
    std::memcpy(&summand, bytes.data() + i * sizeof(float), sizeof summand);
    static_cast<float*>(to)[i] += summand;
  }
}

}  // namespace emulation
