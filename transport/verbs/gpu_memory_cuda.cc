// SPDX-License-Identifier: MIT
#include <unistd.h>

#include <cstdint>

#include "../../lib/cuda_driver_table.h"
#include "gpu_memory.h"

namespace mk::verbs {

bool is_gpu_memory(const void* address) {
  auto driver = cuda::load();
  if (!driver.ok() || address == nullptr) return false;
  CUmemorytype type{};
  const auto pointer = reinterpret_cast<CUdeviceptr>(address);
  return driver.value()->cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, pointer) ==
             CUDA_SUCCESS &&
         type == CU_MEMORYTYPE_DEVICE;
}

Result<FileDescriptor> export_dma_buf(const void* base, size_t bytes) {
  auto driver = cuda::load();
  if (!driver.ok()) return driver.status();
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
