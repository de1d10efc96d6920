// SPDX-License-Identifier: MIT
#include "device.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <string>
#include <utility>

#include "errors.h"

namespace perf {
namespace {

constexpr size_t kAlignment = 256;

void* host_allocate(size_t bytes) {
  return std::aligned_alloc(kAlignment,
                            (std::max<size_t>(bytes, 1) + kAlignment - 1) / kAlignment * kAlignment);
}

void host_copy(void* to, const void* from, size_t bytes) {
  if (bytes) std::memcpy(to, from, bytes);
}

double host_time_us(mk_comm_t comm, const std::function<void()>& launches,
                    const std::function<void()>& meanwhile) {
  const auto start = std::chrono::steady_clock::now();
  launches();
  meanwhile();
  require(mk_comm_synchronize(comm, nullptr), "mk_comm_synchronize", comm);
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count();
}

constexpr DeviceOperations kHost = {MK_DEVICE_HOST, "host",
                                    [](int) {},     host_allocate,
                                    std::free,      host_copy,
                                    host_copy,      [] { return mk_stream_t{nullptr}; },
                                    host_time_us,   [] { return std::string(); },
                                    nullptr};

}  // namespace

const DeviceOperations* find_device(mk_device_t device) {
  return device == MK_DEVICE_CUDA ? cuda_device() : &kHost;
}

DeviceBuffer::DeviceBuffer(const DeviceOperations& operations, size_t bytes)
    : operations_(&operations), data_(operations.allocate(bytes)), bytes_(bytes) {
  if (!data_) {
    throw RunError("out of memory: " + std::to_string(bytes) + " bytes of " + operations.name +
                   " memory for one matrix; choose a smaller shape");
  }
}

DeviceBuffer::DeviceBuffer(const DeviceOperations& operations, mk_comm_t comm, size_t bytes)
    : operations_(&operations), comm_(comm), bytes_(bytes) {
  require(mk_mem_alloc(comm, std::max<size_t>(bytes, 1), &data_), "mk_mem_alloc", comm);
}

DeviceBuffer::~DeviceBuffer() {
  if (!data_) return;
  if (!comm_) {
    operations_->release(data_);
  } else if (std::uncaught_exceptions() == 0) {
    mk_mem_free(comm_, data_);
  }
}

DeviceBuffer::DeviceBuffer(DeviceBuffer&& other) noexcept
    : operations_(other.operations_),
      comm_(other.comm_),
      data_(std::exchange(other.data_, nullptr)),
      bytes_(other.bytes_) {}

void DeviceBuffer::upload(const void* host_memory) const { operations_->upload(data_, host_memory, bytes_); }

void DeviceBuffer::download(void* host_memory) const { operations_->download(host_memory, data_, bytes_); }

}  // namespace perf
