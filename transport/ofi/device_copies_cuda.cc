// SPDX-License-Identifier: MIT
#include <array>
#include <cstdint>
#include <map>
#include <vector>

#include "../../lib/cuda_driver_table.h"
#include "device_copies.h"

namespace mk::ofi {
namespace {

CUdeviceptr device_pointer(const void* address) { return reinterpret_cast<CUdeviceptr>(address); }

// Streams share a GPU's few queues, also with those that the application launches kernels on: four, and an
// event a lane.
constexpr size_t kStreams = 4;

class CudaCopies : public DeviceCopies {
 public:
  explicit CudaCopies(const cuda::Driver& driver) : driver_(driver) {}

  ~CudaCopies() override {
    if (context_ == nullptr) return;
    {
      const cuda::CurrentContext current(driver_, context_);
      for (CUstream stream : streams_) {
        if (stream == nullptr) continue;
        driver_.cuStreamSynchronize(stream);
        driver_.cuStreamDestroy(stream);
      }
      for (const auto& [lane, event] : events_) driver_.cuEventDestroy(event);
      for (void* memory : memories_) driver_.cuMemFreeHost(memory);
    }
    driver_.cuDevicePrimaryCtxRelease(device_);
  }

  bool owns(const void* address) override {
    CUmemorytype type{};
    int ordinal = 0;
    const CUdeviceptr pointer = device_pointer(address);
    if (address == nullptr ||
        driver_.cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, pointer) != CUDA_SUCCESS ||
        type != CU_MEMORYTYPE_DEVICE) {
      return false;
    }
    if (context_ != nullptr) return true;
    return driver_.cuPointerGetAttribute(&ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, pointer) ==
               CUDA_SUCCESS &&
           driver_.cuDeviceGet(&device_, ordinal) == CUDA_SUCCESS &&
           driver_.cuDevicePrimaryCtxRetain(&context_, device_) == CUDA_SUCCESS;
  }

  Result<std::byte*> allocate(size_t bytes) override {
    const cuda::CurrentContext current(driver_, context_);
    MK_RETURN_IF_ERROR(current.status());
    void* memory = nullptr;
    MK_RETURN_IF_ERROR(
        check(driver_.cuMemHostAlloc(&memory, bytes, CU_MEMHOSTALLOC_PORTABLE), "cuMemHostAlloc"));
    memories_.push_back(memory);
    return static_cast<std::byte*>(memory);
  }

  Status start_read(size_t lane, std::byte* host, const std::byte* device, size_t bytes) override {
    const cuda::CurrentContext current(driver_, context_);
    MK_RETURN_IF_ERROR(current.status());
    auto stream = stream_of(lane);
    if (!stream.ok()) return stream.status();
    MK_RETURN_IF_ERROR(check(driver_.cuMemcpyDtoHAsync(host, device_pointer(device), bytes, stream.value()),
                             "cuMemcpyDtoHAsync"));
    return mark(lane, stream.value());
  }

  Status start_write(size_t lane, std::byte* device, const std::byte* host, size_t bytes) override {
    const cuda::CurrentContext current(driver_, context_);
    MK_RETURN_IF_ERROR(current.status());
    auto stream = stream_of(lane);
    if (!stream.ok()) return stream.status();
    MK_RETURN_IF_ERROR(check(driver_.cuMemcpyHtoDAsync(device_pointer(device), host, bytes, stream.value()),
                             "cuMemcpyHtoDAsync"));
    return mark(lane, stream.value());
  }

  Result<bool> done(size_t lane) override {
    const cuda::CurrentContext current(driver_, context_);
    MK_RETURN_IF_ERROR(current.status());
    const CUresult result = driver_.cuEventQuery(events_.at(lane));
    if (result == CUDA_ERROR_NOT_READY) return false;
    MK_RETURN_IF_ERROR(check(result, "cuEventQuery"));
    return true;
  }

 private:
  Status check(CUresult result, const char* what) const { return cuda::error(driver_, result, what); }

  // Not ordered with anyone's default stream.
  Result<CUstream> stream_of(size_t lane) {
    CUstream& stream = streams_[lane % kStreams];
    if (stream == nullptr)
      MK_RETURN_IF_ERROR(check(driver_.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING), "cuStreamCreate"));
    return stream;
  }

  Status mark(size_t lane, CUstream stream) {
    CUevent& event = events_[lane];
    if (event == nullptr)
      MK_RETURN_IF_ERROR(check(driver_.cuEventCreate(&event, CU_EVENT_DISABLE_TIMING), "cuEventCreate"));
    return check(driver_.cuEventRecord(event, stream), "cuEventRecord");
  }

  const cuda::Driver& driver_;
  CUdevice device_ = 0;
  CUcontext context_ = nullptr;
  std::array<CUstream, kStreams> streams_{};
  std::map<size_t, CUevent> events_;
  std::vector<void*> memories_;
};

}  // namespace

std::unique_ptr<DeviceCopies> make_device_copies() {
  auto driver = cuda::load();
  if (!driver.ok()) return nullptr;
  return std::make_unique<CudaCopies>(*driver.value());
}

}  // namespace mk::ofi
