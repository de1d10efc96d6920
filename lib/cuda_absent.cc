// SPDX-License-Identifier: MIT
// Stands in for the CUDA driver and CUDA symmetric memory in builds without CUDA headers.
#include "cuda_driver.h"
#include "symmetric_memory.h"

namespace mk {
namespace {

Status absent() {
  return Status(MK_ERROR_UNSUPPORTED, "this libmkernel was built without CUDA; use the host executor");
}

}  // namespace

namespace cuda {

Result<const Driver*> load() { return absent(); }
Result<int> device_count() { return absent(); }
std::string describe_device(int device) { return format("CUDA device %d", device); }
std::string pci_bus_id(int) { return ""; }

}  // namespace cuda

Result<std::unique_ptr<SymmetricMemory>> make_cuda_symmetric_memory(const Topology&, Exchange&, AbortToken&,
                                                                    int, Deadline) {
  return absent();
}

}  // namespace mk
