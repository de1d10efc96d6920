// SPDX-License-Identifier: MIT
#include "kernels/cuda/clock_exchange.h"

#include "kernels/ptx/memory.cuh"
#include "kernels/ptx/warp.cuh"

namespace mk {
namespace {

__global__ void answer_clock_kernel(ClockExchange* exchange) {
  constexpr uint64_t PATIENCE_NS = 1000000000;
  uint64_t since = ptx::globaltimer();
  for (uint32_t turn = 1; turn <= ClockExchange::kTurns; ++turn) {
    uint64_t now = since;
    while (ptx::ld_acquire_sys(&exchange->asked) < turn) {
      now = ptx::globaltimer();
      if (now > since + PATIENCE_NS) return;
    }
    since = ptx::globaltimer();
    ptx::st_relaxed_sys(&exchange->device_ns, since);
    ptx::st_release_sys(&exchange->answered, turn);
  }
}

}  // namespace

cudaError_t answer_clock(ClockExchange* exchange, cudaStream_t stream) {
  answer_clock_kernel<<<1, 1, 0, stream>>>(exchange);
  return cudaGetLastError();
}

}  // namespace mk
