// SPDX-License-Identifier: MIT
#include "role_pool.h"

#include <system_error>

namespace mk {

RolePool::~RolePool() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  start_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

bool RolePool::run(const std::vector<std::function<void()>>& functions) {
  while (threads_.size() < functions.size()) {
    try {
      threads_.emplace_back([this, index = threads_.size()] { serve(index); });
    } catch (const std::system_error&) {
      return false;
    }
  }
  std::unique_lock lock(mutex_);
  functions_ = &functions;
  running_ = functions.size();
  ++generation_;
  start_.notify_all();
  done_.wait(lock, [this] { return running_ == 0; });
  functions_ = nullptr;
  return true;
}

void RolePool::serve(size_t index) {
  uint64_t seen = 0;
  std::unique_lock lock(mutex_);
  while (true) {
    start_.wait(lock, [&] { return stop_ || generation_ != seen; });
    if (stop_) return;
    seen = generation_;
    if (functions_ == nullptr || index >= functions_->size()) continue;
    const std::function<void()>& function = (*functions_)[index];
    lock.unlock();
    function();
    lock.lock();
    if (--running_ == 0) done_.notify_one();
  }
}

}  // namespace mk
