// SPDX-License-Identifier: MIT
#include <unistd.h>

#include <cstdint>

#include "../../lib/cuda_driver_table.h"
#include "gpu_memory.h"

namespace mk::verbs {
namespace {

// A device's primary context, for as long as the object lives.
class PrimaryContext {
 public:
  PrimaryContext(const cuda::Driver& driver, int ordinal) : driver_(driver) {
    status_ = cuda::error(driver_, driver_.cuDeviceGet(&device_, ordinal), "cuDeviceGet");
    if (status_.ok()) {
      status_ = cuda::error(driver_, driver_.cuDevicePrimaryCtxRetain(&context_, device_),
                            "cuDevicePrimaryCtxRetain");
    }
  }
  ~PrimaryContext() {
    if (context_ != nullptr) driver_.cuDevicePrimaryCtxRelease(device_);
  }
  PrimaryContext(const PrimaryContext&) = delete;
  PrimaryContext& operator=(const PrimaryContext&) = delete;
  const Status& status() const { return status_; }
  CUcontext get() const { return context_; }

 private:
  const cuda::Driver& driver_;
  CUdevice device_ = 0;
  CUcontext context_ = nullptr;
  Status status_;
};

}  // namespace

bool is_gpu_memory(const void* address) {
  auto driver = cuda::load();
  if (!driver.ok() || address == nullptr) return false;
  CUmemorytype type{};
  const auto pointer = reinterpret_cast<CUdeviceptr>(address);
  return driver.value()->cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, pointer) ==
             CUDA_SUCCESS &&
         type == CU_MEMORYTYPE_DEVICE;
}

bool has_gpu() {
  const auto count = cuda::device_count();
  return count.ok() && count.value() > 0;
}

bool exports_dma_buf() {
  auto driver = cuda::load();
  CUdevice device = 0;
  int supported = 0;
  return driver.ok() && driver.value()->cuDeviceGet(&device, 0) == CUDA_SUCCESS &&
         driver.value()->cuDeviceGetAttribute(&supported, CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED, device) ==
             CUDA_SUCCESS &&
         supported != 0;
}

Result<FileDescriptor> export_dma_buf(const void* base, size_t bytes) {
  auto driver = cuda::load();
  if (!driver.ok()) return driver.status();
  // A thread that registers may have no context, or another device's.
  int ordinal = 0;
  MK_RETURN_IF_ERROR(
      cuda::error(*driver.value(),
                  driver.value()->cuPointerGetAttribute(&ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
                                                        reinterpret_cast<CUdeviceptr>(base)),
                  "cuPointerGetAttribute"));
  const PrimaryContext context(*driver.value(), ordinal);
  MK_RETURN_IF_ERROR(context.status());
  const cuda::CurrentContext current(*driver.value(), context.get());
  MK_RETURN_IF_ERROR(current.status());
  int fd = -1;
  const CUresult result = driver.value()->cuMemGetHandleForAddressRange(
      &fd, reinterpret_cast<CUdeviceptr>(base), bytes, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0);
  if (result != CUDA_SUCCESS) {
    return Status(MK_ERROR_UNSUPPORTED,
                  cuda::error(*driver.value(), result, "cuMemGetHandleForAddressRange").sentence());
  }
  return FileDescriptor(fd);
}

bool has_peer_memory() { return access("/sys/module/nvidia_peermem/version", F_OK) == 0; }

}  // namespace mk::verbs
