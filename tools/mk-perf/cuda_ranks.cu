// SPDX-License-Identifier: MIT
#include "cuda_ranks.h"

#include <cuda_runtime.h>

#include "kernels/ptx/memory.cuh"

namespace perf {
namespace {

// At 2 GHz 60 us, longer than a host takes to enqueue two events and a graph, and 20 s.
constexpr long long HEAD_START_CYCLES = 120'000;
constexpr long long DEADLINE_CYCLES = 40'000'000'000;

constexpr int PUSH_THREADS = 512;
constexpr int PUSH_UNROLL = 4;

__global__ void line_up_kernel(LineUp line_up) {
  const long long start = clock64();
  const int peer = threadIdx.x;
  if (peer < line_up.nranks) {
    mk::ptx::st_release_sys(&line_up.flags[peer]->came[line_up.rank], line_up.round);
    const uint64_t* came = &line_up.flags[line_up.rank]->came[peer];
    while (mk::ptx::ld_acquire_sys(came) < line_up.round) {
      if (clock64() - start < DEADLINE_CYCLES) continue;
      *line_up.missing = 1 + peer;
      break;
    }
  }
  __syncthreads();
  const long long all_came = clock64();
  while (clock64() - all_came < HEAD_START_CYCLES) {
  }
}

// CTA i serves peer i mod num_peers.
__global__ void __launch_bounds__(PUSH_THREADS) push_kernel(Push push) {
  const int peer = blockIdx.x % push.num_peers;
  const size_t num_ctas = (gridDim.x - peer + push.num_peers - 1) / push.num_peers;
  const size_t num_threads = num_ctas * PUSH_THREADS;
  const auto* from = reinterpret_cast<const uint4*>(push.from + peer * push.bytes_a_peer);
  auto* to = reinterpret_cast<uint4*>(push.to[peer]);
  const size_t count = push.bytes_a_peer / sizeof(uint4);
  size_t i = (blockIdx.x / push.num_peers) * size_t{PUSH_THREADS} + threadIdx.x;
  for (; i + (PUSH_UNROLL - 1) * num_threads < count; i += PUSH_UNROLL * num_threads) {
    uint4 values[PUSH_UNROLL];
#pragma unroll
    for (int j = 0; j < PUSH_UNROLL; ++j) values[j] = from[i + j * num_threads];
#pragma unroll
    for (int j = 0; j < PUSH_UNROLL; ++j) to[i + j * num_threads] = values[j];
  }
  for (; i < count; i += num_threads) to[i] = from[i];
}

}  // namespace

cudaError_t launch_line_up(const LineUp& line_up, cudaStream_t stream) {
  line_up_kernel<<<1, kMaxGpuRanks, 0, stream>>>(line_up);
  return cudaGetLastError();
}

cudaError_t launch_push(const Push& push, int num_sms, cudaStream_t stream) {
  push_kernel<<<num_sms, PUSH_THREADS, 0, stream>>>(push);
  return cudaGetLastError();
}

}  // namespace perf
