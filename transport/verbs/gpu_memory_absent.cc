// SPDX-License-Identifier: MIT
#include "gpu_memory.h"

namespace mk::verbs {

bool is_gpu_memory(const void*) { return false; }

bool has_gpu() { return false; }

bool exports_dma_buf() { return false; }

Result<FileDescriptor> export_dma_buf(const void*, size_t) {
  return Status(MK_ERROR_UNSUPPORTED, "libmkernel was built without CUDA");
}

bool has_peer_memory() { return false; }

}  // namespace mk::verbs
