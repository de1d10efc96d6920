// SPDX-License-Identifier: MIT
#include "shared_pages.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace mk {

Result<std::shared_ptr<SharedPages>> SharedPages::make(size_t bytes) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t whole = (bytes + page - 1) / page * page;
  void* memory = mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) {
    return Status(MK_ERROR_OUT_OF_MEMORY,
                  format("cannot map %zu bytes of shared memory: %s", whole, std::strerror(errno)));
  }
  return std::shared_ptr<SharedPages>(new SharedPages(static_cast<std::byte*>(memory), whole));
}

SharedPages::~SharedPages() { munmap(data_, bytes_); }

}  // namespace mk
