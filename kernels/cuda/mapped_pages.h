// SPDX-License-Identifier: MIT
// Pages that threads and the current device's kernels share.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <utility>

#include "kernels/cuda/cuda_error.h"
#include "transport/shared_pages.h"

namespace mk {

class MappedPages {
 public:
  static Result<std::unique_ptr<MappedPages>> map(std::shared_ptr<SharedPages> pages) {
    std::unique_ptr<MappedPages> mapped(new MappedPages(std::move(pages)));
    MK_RETURN_IF_ERROR(cuda_error(cudaHostRegister(mapped->pages_->data(), mapped->pages_->bytes(),
                                                   cudaHostRegisterMapped | cudaHostRegisterPortable),
                                  "pinning host memory that the GPU shares"));
    mapped->is_registered_ = true;
    void* address = nullptr;
    MK_RETURN_IF_ERROR(cuda_error(cudaHostGetDevicePointer(&address, mapped->pages_->data(), 0),
                                  "mapping host memory that the GPU shares"));
    mapped->device_ = static_cast<std::byte*>(address);
    return std::unique_ptr<MappedPages>(std::move(mapped));
  }
  ~MappedPages() {
    if (is_registered_) cudaHostUnregister(pages_->data());
  }
  MappedPages(const MappedPages&) = delete;
  MappedPages& operator=(const MappedPages&) = delete;

  std::byte* host() const { return pages_->data(); }
  std::byte* device() const { return device_; }  // as the device addresses them

 private:
  explicit MappedPages(std::shared_ptr<SharedPages> pages) : pages_(std::move(pages)) {}

  const std::shared_ptr<SharedPages> pages_;
  std::byte* device_ = nullptr;
  bool is_registered_ = false;
};

}  // namespace mk
