// SPDX-License-Identifier: MIT
// What the CUDA driver says of memory that a NIC is to register. Without CUDA in the build all memory is the
// host's.
#pragma once

#include <cstddef>

#include "../../lib/file_descriptor.h"
#include "../../lib/status.h"

namespace mk::verbs {

bool is_gpu_memory(const void* address);
bool has_gpu();
// Whether the first GPU's driver says that it can export dma-buf memory.
bool exports_dma_buf();
// A dma-buf descriptor of [base, base + bytes), whole pages of the host. MK_ERROR_UNSUPPORTED when the driver
// or the GPU gives none: then nvidia_peermem may help, which registers the address itself.
Result<FileDescriptor> export_dma_buf(const void* base, size_t bytes);
// Whether nvidia_peermem is loaded.
bool has_peer_memory();

}  // namespace mk::verbs
