// SPDX-License-Identifier: MIT
// What the network between nodes must know of a GPU.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cctype>

#include "kernels/cuda/cuda_error.h"
#include "kernels/cuda/write_flush.h"
#include "kernels/executor.h"

namespace mk {
namespace {

Status flush_writes(int device) {
  const CurrentDevice current(device);
  MK_RETURN_IF_ERROR(current.status());
  return cuda_error(cudaDeviceFlushGPUDirectRDMAWrites(cudaFlushGPUDirectRDMAWritesTargetCurrentDevice,
                                                       cudaFlushGPUDirectRDMAWritesToOwner),
                    "cudaDeviceFlushGPUDirectRDMAWrites");
}

}  // namespace

Result<GpuNetworkTraits> cuda_network_traits(int ordinal) {
  if (ordinal < 0) MK_RETURN_IF_ERROR(cuda_error(cudaGetDevice(&ordinal), "cudaGetDevice"));
  GpuNetworkTraits traits;
  char bus_id[32] = {};
  MK_RETURN_IF_ERROR(
      cuda_error(cudaDeviceGetPCIBusId(bus_id, sizeof bus_id, ordinal), "cudaDeviceGetPCIBusId"));
  traits.pci_bus_id = bus_id;
  // The driver writes capitals, sysfs does not.
  std::transform(traits.pci_bus_id.begin(), traits.pci_bus_id.end(), traits.pci_bus_id.begin(),
                 [](unsigned char letter) { return static_cast<char>(std::tolower(letter)); });
  int supported = 0, ordering = 0, options = 0;
  MK_RETURN_IF_ERROR(cuda_error(cudaDeviceGetAttribute(&supported, cudaDevAttrGPUDirectRDMASupported, ordinal),
                                "asking for GPUDirect RDMA"));
  // Then no NIC writes to it: emulated ones and staging transports copy.
  if (supported == 0) return traits;
  MK_RETURN_IF_ERROR(
      cuda_error(cudaDeviceGetAttribute(&ordering, cudaDevAttrGPUDirectRDMAWritesOrdering, ordinal),
                 "asking for the order of RDMA writes"));
  MK_RETURN_IF_ERROR(
      cuda_error(cudaDeviceGetAttribute(&options, cudaDevAttrGPUDirectRDMAFlushWritesOptions, ordinal),
                 "asking how RDMA writes are flushed"));
  switch (write_flush(ordering, options)) {
    case WriteFlush::none:
      break;
    case WriteFlush::by_driver:
      traits.flush_writes = [ordinal] { return flush_writes(ordinal); };
      break;
    case WriteFlush::impossible:
      return Status(
          MK_ERROR_UNSUPPORTED,
          format("device %d neither sees a NIC's writes in order nor lets the host flush them (ordering "
                 "%d, flush options %d): operators between nodes cannot use its memory",
                 ordinal, ordering, options));
  }
  return traits;
}

}  // namespace mk
