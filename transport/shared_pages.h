// SPDX-License-Identifier: MIT
// Zeroed memory in whole pages that threads share and a GPU may share with them, once it is registered with the
// driver: a shared mapping, since after a fork a private one would part the process from the pages that the GPU
// has.
#pragma once

#include <cstddef>
#include <memory>

#include "../lib/status.h"

namespace mk {

class SharedPages {
 public:
  // At least `bytes`, rounded up to pages.
  static Result<std::shared_ptr<SharedPages>> make(size_t bytes);
  ~SharedPages();
  SharedPages(const SharedPages&) = delete;
  SharedPages& operator=(const SharedPages&) = delete;

  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  SharedPages(std::byte* data, size_t bytes) : data_(data), bytes_(bytes) {}

  std::byte* const data_;
  const size_t bytes_;
};

}  // namespace mk
