// SPDX-License-Identifier: MIT
// Kernels of GpuRanks.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace perf {

constexpr int kMaxGpuRanks = 16;

// At the start of the memory that a rank shares.
struct LineUpFlags {
  uint64_t came[kMaxGpuRanks];  // how often each rank has
};

struct LineUp {
  int rank = 0;
  int nranks = 0;
  uint64_t round = 0;  // from 1
  LineUpFlags* flags[kMaxGpuRanks] = {};
  uint32_t* missing = nullptr;  // device memory: 1 + the rank that did not come
};

cudaError_t launch_line_up(const LineUp& line_up, cudaStream_t stream);

struct Push {
  int num_peers = 0;
  std::byte* to[kMaxGpuRanks] = {};
  const std::byte* from = nullptr;
  size_t bytes_a_peer = 0;  // a multiple of 16
};

cudaError_t launch_push(const Push& push, int num_sms, cudaStream_t stream);

}  // namespace perf
