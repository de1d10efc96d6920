// SPDX-License-Identifier: MIT
// What the emulated NICs can do, as ibv_query_device and efadv_query_device report it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "packet.h"

namespace softnic {

inline constexpr size_t kMaxQueuePairs = 65536;
inline constexpr uint32_t kMaxQueueDepth = 32768;  // work requests of a send or receive queue
inline constexpr uint32_t kMaxCompletions = 4194303;
inline constexpr uint32_t kMaxMessageBytes = 1u << 30;
inline constexpr uint32_t kMaxRcInlineBytes = 220;
inline constexpr uint32_t kMaxEfaInlineBytes = 32;
inline constexpr uint32_t kMaxEfaQueueDepth = 4096;
inline constexpr uint32_t kMaxReadBytes = kMaxInlineBytes;  // a read's bytes come back in the reply
static_assert(kMaxRcInlineBytes <= kMaxInlineBytes);

// EFA's completion status, ibv_wc::vendor_err.
enum class EfaStatus : uint8_t {
  flushed = 1,
  invalid_lkey = 5,
  bad_length = 6,
  bad_address = 7,
  abort = 8,
  bad_dest_qpn = 9,
  not_ready = 10,
  unresponsive = 13,
  unknown_peer = 14,
};

}  // namespace softnic
