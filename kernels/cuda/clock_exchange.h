// SPDX-License-Identifier: MIT
// How the device's clock relates to the host's.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace mk {

// In pinned host memory that the device addresses, too. The host asks for the time, a kernel answers.
struct ClockExchange {
  static constexpr uint32_t kTurns = 64;
  alignas(128) uint32_t asked;  // questions so far; beyond kTurns: the host has gone
  alignas(128) uint32_t answered;
  uint64_t device_ns;  // the last answer
};

// Enqueues the kernel that answers. It ends after kTurns questions, or a second without any.
cudaError_t answer_clock(ClockExchange* exchange, cudaStream_t stream);

}  // namespace mk
