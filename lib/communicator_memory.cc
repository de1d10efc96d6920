// SPDX-License-Identifier: MIT
// The communicator's symmetric and registered memory: mk_mem_*.
#include <algorithm>

#include "communicator.h"
#include "wire.h"

namespace mk {
namespace {

constexpr size_t kMinUserGrowth = 1 << 20;
constexpr size_t kMaxRegions = 1024;

Bytes encode(uint64_t value) { return WireWriter().integer(value).take(); }

}  // namespace

Status Communicator::grow_user_memory(size_t bytes, Deadline deadline) {
  if (!user_memory_) {
    auto made = executor_->make_memory(deadline);
    if (!made.ok()) return fatal(made.status());
    user_memory_ = made.take();
  }
  // More than is needed where there is room for it.
  size_t growth = std::max(bytes, kMinUserGrowth);
  if (!workspace_has_room(growth, user_memory_->granularity())) growth = bytes;
  if (!workspace_has_room(growth, user_memory_->granularity())) {
    return Status(MK_ERROR_OUT_OF_MEMORY,
                  format("mk_mem_alloc: %zu bytes, in steps of %zu, beside the %zu in use exceed "
                         "max_workspace_bytes %llu",
                         bytes, user_memory_->granularity(), workspace_bytes(),
                         static_cast<unsigned long long>(config_.max_workspace_bytes)));
  }
  Result<size_t> offset = user_memory_->grow(growth, deadline);
  if (!offset.ok()) return fatal(offset.status());
  heap_.extend(user_memory_->size() - offset.value());
  return {};
}

Result<void*> Communicator::mem_alloc(size_t bytes) {
  const Deadline deadline = step_deadline();
  MK_RETURN_IF_ERROR(
      meet(MeetingKind::mem_alloc, format("mk_mem_alloc(%zu bytes)", bytes), encode(bytes), deadline));
  std::optional<size_t> offset = heap_.allocate(bytes);
  if (!offset) {
    MK_RETURN_IF_ERROR(grow_user_memory(bytes, deadline));
    offset = heap_.allocate(bytes);
  }
  if (!offset)
    return Status(MK_ERROR_OUT_OF_MEMORY, format("mk_mem_alloc: no room for %zu bytes after growth", bytes));
  allocations_.push_back({*offset, bytes});
  return static_cast<void*>(user_memory_->local(*offset));
}

Status Communicator::mem_free(void* pointer) {
  const auto found = std::find_if(allocations_.begin(), allocations_.end(), [&](const Allocation& allocation) {
    return user_memory_->local(allocation.offset) == pointer;
  });
  if (found == allocations_.end()) {
    return Status(
        MK_ERROR_INVALID_ARGUMENT,
        format("mk_mem_free: expected a pointer from mk_mem_alloc of this communicator, saw %p", pointer));
  }
  const Allocation allocation = *found;
  MK_RETURN_IF_ERROR(meet(MeetingKind::mem_free, format("mk_mem_free(offset %zu)", allocation.offset),
                          encode(allocation.offset), step_deadline()));
  heap_.free(allocation.offset);
  allocations_.erase(found);
  return {};
}

Result<uint64_t> Communicator::mem_register(void* pointer, size_t bytes) {
  auto* base = static_cast<std::byte*>(pointer);
  for (const Registered& other : registered_) {
    if (base < other.base + other.bytes && other.base < base + bytes) {
      return Status(
          MK_ERROR_INVALID_ARGUMENT,
          format("mk_mem_register: [%p, +%zu) overlaps [%p, +%zu), which is registered; deregister that first",
                 pointer, bytes, static_cast<void*>(other.base), other.bytes));
    }
  }
  if (registered_.size() >= kMaxRegions) {
    return Status(MK_ERROR_OUT_OF_MEMORY,
                  format("mk_mem_register: %zu regions are registered, the most there can be", kMaxRegions));
  }
  const Deadline deadline = step_deadline();
  MK_RETURN_IF_ERROR(meet(MeetingKind::mem_register, "mk_mem_register", {}, deadline));
  uint32_t region = 0;
  if (endpoint_) {
    Result<uint32_t> made = endpoint_->register_region(pointer, bytes, deadline);
    if (!made.ok()) return fatal(made.status());
    region = made.value();
  }
  // The communicator's number in the upper half: a handle of another communicator is not found here.
  registered_.push_back({instance_ << 32 | ++last_memory_handle_, base, bytes, region});
  return registered_.back().handle;
}

Status Communicator::mem_deregister(uint64_t handle) {
  const auto found = std::find_if(registered_.begin(), registered_.end(),
                                  [&](const Registered& region) { return region.handle == handle; });
  if (found == registered_.end()) {
    return Status(MK_ERROR_INVALID_HANDLE,
                  "mk_mem_deregister: expected a handle of mk_mem_register on this communicator that is still "
                  "registered");
  }
  MK_RETURN_IF_ERROR(meet(MeetingKind::mem_deregister,
                          format("mk_mem_deregister(%u)", static_cast<uint32_t>(handle)),
                          encode(static_cast<uint32_t>(handle)), step_deadline()));
  if (endpoint_) endpoint_->deregister_region(found->region);
  registered_.erase(found);
  return {};
}

std::optional<uint64_t> Communicator::symmetric_offset(const void* pointer, size_t bytes) const {
  if (!user_memory_) return std::nullopt;
  const auto* base = static_cast<const std::byte*>(pointer);
  for (const Allocation& allocation : allocations_) {
    const std::byte* begin = user_memory_->local(allocation.offset);
    if (base >= begin && base + bytes <= begin + allocation.bytes) {
      return allocation.offset + static_cast<uint64_t>(base - begin);
    }
  }
  return std::nullopt;
}

std::optional<std::pair<uint32_t, uint64_t>> Communicator::registered_region(const void* pointer,
                                                                             size_t bytes) const {
  const auto* base = static_cast<const std::byte*>(pointer);
  for (const Registered& region : registered_) {
    if (base >= region.base && base + bytes <= region.base + region.bytes) {
      return std::pair{region.region, static_cast<uint64_t>(base - region.base)};
    }
  }
  return std::nullopt;
}

}  // namespace mk
