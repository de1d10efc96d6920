// SPDX-License-Identifier: MIT
// Sees through the host executor's hooks what completes while a transfer is held back.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "kernels/host/hooks.h"

namespace mk::test {

// Counts finished rows, and holds what `is_held` says until it is released.
class Observer {
 public:
  using IsHeld = std::function<bool(int rank, int source, int chunk)>;

  explicit Observer(IsHeld is_held) {
    hooks_.hold = [this, is_held = std::move(is_held)](int rank, int source, int chunk) {
      return !released_.load() && is_held(rank, source, chunk);
    };
    hooks_.tile_done = [this](int rank, int source) {
      std::lock_guard lock(mutex_);
      ++done_[{rank, source}];
      changed_.notify_all();
    };
    mk::host_hooks = &hooks_;
  }
  ~Observer() { mk::host_hooks = nullptr; }

  void release() { released_ = true; }
  // Waits until the counts are `expected`, then a while longer for one too many; "" or what differs.
  std::string settles_at(const std::map<std::pair<int, int>, int>& expected) {
    {
      std::unique_lock lock(mutex_);
      const auto limit = std::chrono::system_clock::now() + std::chrono::seconds(20);
      while (done_ != expected && changed_.wait_until(lock, limit) != std::cv_status::timeout) {
      }
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    std::lock_guard lock(mutex_);
    std::string text;
    for (const auto& [place, count] : expected) {
      if (done_[place] == count) continue;
      text += "rank " + std::to_string(place.first) + " has finished " + std::to_string(done_[place]) +
              " of rank " + std::to_string(place.second) + "'s, expected " + std::to_string(count) + "\n";
    }
    for (const auto& [place, count] : done_) {
      if (count > 0 && !expected.contains(place))
        text += "rank " + std::to_string(place.first) + " has finished " + std::to_string(place.second) + "\n";
    }
    return text;
  }

 private:
  mk::HostHooks hooks_;
  std::atomic<bool> released_{false};
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::pair<int, int>, int> done_;  // (rank, source), or (rank, block)
};

}  // namespace mk::test
