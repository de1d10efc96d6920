// SPDX-License-Identifier: MIT
// Bulk copies between shared and global memory, which are as late as they may be: a load is done when the lane
// that has asked for it waits at its barrier, a store when it waits for its group. Until then other bytes are
// where they go, and what nobody waits for is never done. But what they read has to be there, and where they
// write has to be free, when they are asked for.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace emulation {

class BulkCopies {
 public:
  void load(void* to, const void* from, size_t num_bytes, const uint64_t* barrier);
  void complete_loads(const uint64_t* barrier);

  void store(void* to, const void* from, size_t num_bytes);
  // The same of fp32 elements that are added to what is there.
  void add(void* to, const void* from, size_t num_bytes);
  void commit_group() { ++num_groups_; }
  // Of all groups but the last `num_pending`.
  void complete_reads(uint64_t num_pending);
  void complete_stores(uint64_t num_pending);

 private:
  struct Copy {
    void* to;
    const void* from;
    std::vector<std::byte> bytes;
    const uint64_t* barrier = nullptr;
    uint64_t group = 0;
    bool is_read = false;
    bool adds = false;
    void read();
    void write() const;
  };
  static Copy ask(void* to, const void* from, size_t num_bytes);

  std::vector<Copy> loads_, stores_;
  uint64_t num_groups_ = 0;
};

BulkCopies& bulk_copies();  // of the calling lane

}  // namespace emulation
