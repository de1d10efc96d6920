// SPDX-License-Identifier: MIT
// The regions of one rank, and how large the regions of the same id are at its peers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <vector>

#include "../lib/status.h"

namespace mk {

// A region's bounds at one rank. The generation counts registrations and is equal on all ranks: a put that was
// meant for an earlier region of the same id is told from one for the present region.
struct Region {
  std::byte* base = nullptr;
  uint64_t bytes = 0;
  uint32_t generation = 0;           // 0: not registered
  std::vector<uint64_t> peer_bytes;  // by rank; empty until the peers are known
};

// Thread-safe.
class RegionTable {
 public:
  static constexpr uint32_t kMaxRegions = 4096;

  // The lowest id that is free; kMaxRegions when none is.
  uint32_t free_id() const;
  void add(uint32_t id, std::byte* base, uint64_t bytes, uint32_t generation);
  void set_peer_bytes(uint32_t id, std::vector<uint64_t> peer_bytes);
  // Returns after a place() that is under way has ended.
  void remove(uint32_t id);

  // Resolves a range of this rank's memory for reading it.
  Result<const std::byte*> source(uint32_t id, uint64_t offset, uint64_t bytes) const;
  // Checks a range of a peer's region and returns the region's generation.
  Result<uint32_t> target(uint32_t id, int peer, uint64_t offset, uint64_t bytes) const;
  // Checks that a put of a peer, bytes [offset, offset + put_bytes) of the region, fits into this rank's region
  // ...
  Status check_put(uint32_t id, uint32_t generation, uint64_t offset, uint64_t put_bytes) const;
  // ... and copies a piece of it there, unless the region is gone by now.
  Status place(uint32_t id, uint32_t generation, uint64_t offset, std::span<const std::byte> piece);

 private:
  Status check_locked(uint32_t id, uint32_t generation, uint64_t offset, uint64_t bytes) const;

  mutable std::mutex mutex_;
  std::vector<Region> regions_;
};

}  // namespace mk
