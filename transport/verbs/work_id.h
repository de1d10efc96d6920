// SPDX-License-Identifier: MIT
// What a work request is for, in the 64 bits that its completion brings back.
#pragma once

#include <cstdint>

namespace mk::verbs {

enum class WorkKind : uint8_t { data = 1, control = 2, bye = 3, receive = 4 };

struct WorkId {
  WorkKind kind = WorkKind::data;
  uint16_t peer = 0;
  uint8_t link = 0;
  uint8_t slot = 0;
  uint32_t count = 0;  // requests of the queue that the completion stands for, below 2^24
};

inline constexpr uint64_t encode(const WorkId& id) {
  return static_cast<uint64_t>(id.kind) << 56 | static_cast<uint64_t>(id.peer) << 40 |
         static_cast<uint64_t>(id.link) << 32 | static_cast<uint64_t>(id.slot) << 24 | id.count;
}
inline constexpr WorkId decode_work(uint64_t id) {
  return {static_cast<WorkKind>(id >> 56), static_cast<uint16_t>(id >> 40), static_cast<uint8_t>(id >> 32),
          static_cast<uint8_t>(id >> 24), static_cast<uint32_t>(id & 0xffffff)};
}

}  // namespace mk::verbs
