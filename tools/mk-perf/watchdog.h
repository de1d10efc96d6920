// SPDX-License-Identifier: MIT
// A deadline for calls into other libraries that have none themselves.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>

namespace perf {

// While it lives, a clock runs; when it runs out the process says what it was waiting for and ends with
// kExitFailure. Nothing less helps against a thread that another library does not let go.
class Watchdog {
 public:
  Watchdog(std::chrono::seconds deadline, std::string what);
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
  std::thread thread_;
};

}  // namespace perf
