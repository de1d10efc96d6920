// SPDX-License-Identifier: MIT
// Regions as the NICs see them: each in pieces of at most kRegistrationBytes, on every NIC of the rank, with
// the keys of the peers. Thread-safe: one thread registers while the proxy posts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "../../lib/exchange.h"
#include "nic.h"
#include "put_pieces.h"

namespace mk::verbs {

// How a peer's region is reached.
struct RemoteRegion {
  uint64_t base = 0;
  std::vector<std::vector<uint32_t>> rkeys;  // [the peer's NIC][registration]
};

struct RegionKeys {
  const std::byte* base = nullptr;
  uint64_t bytes = 0;
  std::vector<std::vector<uint32_t>> lkeys;  // [NIC][registration]
  std::vector<RemoteRegion> peers;           // by rank; empty until they are known
};

class Registration {
 public:
  // The NICs, all of one library, outlive it.
  explicit Registration(const std::vector<std::unique_ptr<Nic>>& nics) : nics_(nics) {}
  ~Registration();

  // The answer is what peers need: base, number of NICs, remote keys.
  Result<Bytes> add(uint32_t region, std::byte* base, size_t bytes);
  // `peer_nics`: by rank, how many NICs it has; 0 for ranks that are not written to.
  Status set_peer_keys(uint32_t region, std::span<const Bytes> keys, std::span<const size_t> peer_nics);
  void remove(uint32_t region);
  // nullptr when the region is not registered (any more).
  std::shared_ptr<const RegionKeys> find(uint32_t region) const;

 private:
  struct Entry {
    std::vector<ibv_mr*> mrs;
    std::shared_ptr<const RegionKeys> keys;
  };
  Result<ibv_mr*> register_range(const Nic& nic, std::byte* base, size_t bytes, bool gpu) const;
  void deregister(Entry& entry) const;

  const std::vector<std::unique_ptr<Nic>>& nics_;
  mutable std::mutex mutex_;
  std::map<uint32_t, Entry> entries_;
};

}  // namespace mk::verbs
