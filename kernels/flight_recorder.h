// SPDX-License-Identifier: MIT
#pragma once

#include <array>
#include <chrono>
#include <mutex>

#include "operator_call.h"

namespace mk {

// The last launches of a rank. Thread-safe.
class FlightRecorder {
 public:
  enum State : int32_t { running = 1, completed = 2, failed = 3 };

  // Records that launch `epoch` is now in `state`.
  void record(uint64_t epoch, const OperatorCall& call, State state);
  // All recorded launches have completed, as far as the host can tell.
  void complete();
  // The last launches, oldest first.
  size_t copy(mk_flight_entry_t* entries, size_t capacity) const;

 private:
  static constexpr size_t kEntries = 64;
  int64_t now_us() const;

  const std::chrono::steady_clock::time_point birth_ = std::chrono::steady_clock::now();
  mutable std::mutex mutex_;
  std::array<mk_flight_entry_t, kEntries> entries_{};  // launch e at e % kEntries
  uint64_t last_ = 0;
};

}  // namespace mk
