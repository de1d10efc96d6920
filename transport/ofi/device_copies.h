// SPDX-License-Identifier: MIT
// Copies between host memory that the provider can use and memory of a GPU, which it cannot.
#pragma once

#include <cstddef>
#include <memory>

#include "../../lib/status.h"

namespace mk::ofi {

// No call waits. A lane holds one copy at a time; lanes are independent of one another. One thread at a time.
class DeviceCopies {
 public:
  virtual ~DeviceCopies() = default;
  // Whether the address is in a GPU's memory. All such memory of a rank is on one GPU.
  virtual bool owns(const void* address) = 0;
  // Pinned host memory, which lives as long as this object.
  virtual Result<std::byte*> allocate(size_t bytes) = 0;
  virtual Status start_read(size_t lane, std::byte* host, const std::byte* device, size_t bytes) = 0;
  virtual Status start_write(size_t lane, std::byte* device, const std::byte* host, size_t bytes) = 0;
  // Whether the lane's copy has ended.
  virtual Result<bool> done(size_t lane) = 0;
};

// By the CUDA driver; nullptr when the library was built without CUDA or there is no driver.
std::unique_ptr<DeviceCopies> make_device_copies();

}  // namespace mk::ofi
