// SPDX-License-Identifier: MIT
#pragma once

#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace mk {

// Threads that run the roles of one launch after another. Grows to the largest launch seen; idle threads sleep.
class RolePool {
 public:
  RolePool() = default;
  ~RolePool();
  RolePool(const RolePool&) = delete;
  RolePool& operator=(const RolePool&) = delete;

  // Runs all functions at the same time, one a thread, and returns when all have ended. False: a thread could
  // not be had, and none has run.
  bool run(const std::vector<std::function<void()>>& functions);

 private:
  void serve(size_t index);

  std::mutex mutex_;
  std::condition_variable start_;
  std::condition_variable done_;
  const std::vector<std::function<void()>>* functions_ = nullptr;
  uint64_t generation_ = 0;
  size_t running_ = 0;
  bool stop_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace mk
