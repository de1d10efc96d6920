// SPDX-License-Identifier: MIT
// How a put is cut: into stripes, one a link, and each stripe into pieces, one an RDMA write.
#pragma once

#include <algorithm>
#include <cstdint>

namespace mk::verbs {

inline constexpr uint32_t kMaxLinks = 8;                  // NICs that a pair of ranks uses at once
inline constexpr uint32_t kStripeAlignment = 128;         // of a stripe's end in the target's memory
inline constexpr uint64_t kRegistrationBytes = 1u << 30;  // of one memory region of a NIC
// Below so many bytes a stripe costs more than it gains.
inline constexpr uint32_t kMinStripeBytes = 32u << 10;

struct Range {
  uint64_t begin = 0;
  uint64_t end = 0;
};

inline uint32_t num_stripes(uint32_t bytes, uint32_t num_links) {
  return std::clamp<uint32_t>(bytes / kMinStripeBytes, 1, num_links);
}

// Stripe number `index` of a put to `target_offset`: bytes of the put. No two stripes share 128 aligned bytes
// of the target.
inline Range stripe(uint64_t target_offset, uint32_t bytes, uint32_t stripes, uint32_t index) {
  const auto cut = [&](uint64_t n) -> uint64_t {
    if (n == 0) return 0;
    if (n >= stripes) return bytes;
    const uint64_t at = target_offset + uint64_t{bytes} * n / stripes;
    const uint64_t aligned = at / kStripeAlignment * kStripeAlignment;
    return aligned <= target_offset ? 0 : aligned - target_offset;
  };
  return {cut(index), cut(index + 1)};
}

// Bytes of the next piece of a stripe, which has `left` bytes: no piece crosses the end of a registration on
// either side.
inline uint32_t piece_bytes(uint64_t source_offset, uint64_t target_offset, uint64_t left, uint64_t most) {
  const auto room = [](uint64_t offset) { return kRegistrationBytes - offset % kRegistrationBytes; };
  return static_cast<uint32_t>(std::min({left, most, room(source_offset), room(target_offset)}));
}

inline uint32_t count_pieces(uint64_t source_offset, uint64_t target_offset, Range range, uint64_t most) {
  uint32_t count = 0;
  for (uint64_t at = range.begin; at < range.end; ++count) {
    at += piece_bytes(source_offset + at, target_offset + at, range.end - at, most);
  }
  return std::max(count, 1u);
}

}  // namespace mk::verbs
