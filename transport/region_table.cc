// SPDX-License-Identifier: MIT
#include "region_table.h"

#include <algorithm>
#include <cstring>

namespace mk {
namespace {

bool outside(uint64_t offset, uint64_t bytes, uint64_t region_bytes) {
  return offset > region_bytes || bytes > region_bytes - offset;
}

Status range_error(const char* whose, uint32_t id, uint64_t offset, uint64_t bytes, uint64_t region_bytes) {
  return Status(MK_ERROR_INTERNAL,
                format("%s bytes [%llu, +%llu) of region %u, which has %llu", whose,
                       static_cast<unsigned long long>(offset), static_cast<unsigned long long>(bytes), id,
                       static_cast<unsigned long long>(region_bytes)));
}

}  // namespace

uint32_t RegionTable::free_id() const {
  std::lock_guard lock(mutex_);
  const auto free =
      std::find_if(regions_.begin(), regions_.end(), [](const Region& r) { return r.generation == 0; });
  return static_cast<uint32_t>(free - regions_.begin());
}

void RegionTable::add(uint32_t id, std::byte* base, uint64_t bytes, uint32_t generation) {
  std::lock_guard lock(mutex_);
  if (regions_.size() <= id) regions_.resize(id + 1);
  regions_[id] = Region{base, bytes, generation, {}};
}

void RegionTable::set_peer_bytes(uint32_t id, std::vector<uint64_t> peer_bytes) {
  std::lock_guard lock(mutex_);
  regions_[id].peer_bytes = std::move(peer_bytes);
}

void RegionTable::remove(uint32_t id) {
  std::lock_guard lock(mutex_);
  if (id < regions_.size()) regions_[id] = Region{};
}

Result<const std::byte*> RegionTable::source(uint32_t id, uint64_t offset, uint64_t bytes) const {
  std::lock_guard lock(mutex_);
  if (id >= regions_.size() || regions_[id].generation == 0) {
    return Status(MK_ERROR_INTERNAL, format("its source is in region %u, which is not registered", id));
  }
  const Region& region = regions_[id];
  if (outside(offset, bytes, region.bytes)) {
    return range_error("its source is", id, offset, bytes, region.bytes);
  }
  return region.bytes == 0 ? region.base : region.base + offset;
}

Result<uint32_t> RegionTable::target(uint32_t id, int peer, uint64_t offset, uint64_t bytes) const {
  std::lock_guard lock(mutex_);
  if (id >= regions_.size() || regions_[id].generation == 0 || regions_[id].peer_bytes.empty()) {
    return Status(MK_ERROR_INTERNAL, format("its target is in region %u, which is not registered", id));
  }
  const uint64_t peer_bytes = regions_[id].peer_bytes[static_cast<size_t>(peer)];
  if (outside(offset, bytes, peer_bytes)) return range_error("its target is", id, offset, bytes, peer_bytes);
  return regions_[id].generation;
}

Status RegionTable::check_locked(uint32_t id, uint32_t generation, uint64_t offset, uint64_t bytes) const {
  if (id >= regions_.size() || generation == 0 || regions_[id].generation != generation) {
    return Status(MK_ERROR_INTERNAL,
                  format("it writes to region %u of generation %u, which is not registered (any more) here", id,
                         generation));
  }
  if (outside(offset, bytes, regions_[id].bytes)) {
    return range_error("it writes to", id, offset, bytes, regions_[id].bytes);
  }
  return {};
}

Status RegionTable::check_put(uint32_t id, uint32_t generation, uint64_t offset, uint64_t put_bytes) const {
  std::lock_guard lock(mutex_);
  return check_locked(id, generation, offset, put_bytes);
}

Status RegionTable::place(uint32_t id, uint32_t generation, uint64_t offset, std::span<const std::byte> piece) {
  std::lock_guard lock(mutex_);
  MK_RETURN_IF_ERROR(check_locked(id, generation, offset, piece.size()));
  if (!piece.empty()) std::memcpy(regions_[id].base + offset, piece.data(), piece.size());
  return {};
}

}  // namespace mk
