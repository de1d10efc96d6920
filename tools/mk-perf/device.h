// SPDX-License-Identifier: MIT
// What a benchmark needs of the memory and the clock that an executor works with. One table an executor.
#pragma once

#include <cstddef>
#include <functional>

#include "mkernel.h"

namespace perf {

struct DeviceOperations {
  mk_device_t device;
  const char* name;                 // as it is printed
  void (*select)(int cuda_device);  // for what follows in this thread; once, before the rest
  void* (*allocate)(size_t bytes);
  void (*release)(void* memory);
  void (*upload)(void* device_memory, const void* host_memory, size_t bytes);
  void (*download)(void* host_memory, const void* device_memory, size_t bytes);
  mk_stream_t (*stream)();
  // Microseconds from just before `launches` until all that it enqueued on comm has completed.
  double (*time_us)(mk_comm_t comm, const std::function<void()>& launches);
};

// nullptr in builds without CUDA.
const DeviceOperations* cuda_device();

// nullptr: this mk-perf cannot drive the device.
const DeviceOperations* find_device(mk_device_t device);

// Memory of a device.
class DeviceBuffer {
 public:
  DeviceBuffer(const DeviceOperations& operations, size_t bytes);
  ~DeviceBuffer();
  DeviceBuffer(DeviceBuffer&& other) noexcept;
  DeviceBuffer& operator=(DeviceBuffer&&) = delete;

  void* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  void upload(const void* host_memory) const;
  void download(void* host_memory) const;

 private:
  const DeviceOperations* operations_;
  void* data_;
  size_t bytes_;
};

}  // namespace perf
