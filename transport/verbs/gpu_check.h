// SPDX-License-Identifier: MIT
// Whether this machine's RDMA devices can read and write a GPU's memory, for people: mk-perf --check-network.
#pragma once

#include <string>

namespace mk::verbs {

// What one device, the GPU's driver and the kernel's modules offer.
struct GpuReach {
  bool has_gpu = false;
  bool nic_dma_buf = false;     // the NIC's driver imports dma-buf memory
  bool gpu_dma_buf = false;     // the GPU's driver exports it
  bool library_dma_buf = true;  // libibverbs knows of it
  bool peer_memory = false;     // nvidia_peermem is loaded
};
// "through dma-buf", ...; what is missing and what to do is in `problem`, empty when nothing is.
struct GpuVerdict {
  std::string text;
  std::string problem;
};
GpuVerdict judge(const GpuReach& reach);

// A line a device that rc or srd could use, and a line a problem. Empty where there is no such device or no
// GPU.
GpuVerdict check_gpu_memory();

}  // namespace mk::verbs
