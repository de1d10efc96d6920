// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <chrono>

namespace mk {

// A moment after which a wait gives up.
class Deadline {
 public:
  using Clock = std::chrono::steady_clock;

  static Deadline after(std::chrono::milliseconds span) { return Deadline(Clock::now() + span); }
  static Deadline at(Clock::time_point moment) { return Deadline(moment); }

  bool passed() const { return Clock::now() >= moment_; }
  Clock::time_point moment() const { return moment_; }
  // Milliseconds left, rounded up and never negative: a timeout for poll(2).
  int left_ms() const {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(moment_ - Clock::now()).count();
    return static_cast<int>(std::clamp<long long>(left, 0, 1 << 30));
  }

 private:
  explicit Deadline(Clock::time_point moment) : moment_(moment) {}
  Clock::time_point moment_;
};

}  // namespace mk
