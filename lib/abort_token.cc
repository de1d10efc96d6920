// SPDX-License-Identifier: MIT
#include "abort_token.h"

#include <sys/eventfd.h>
#include <unistd.h>

namespace mk {

AbortToken::AbortToken() : fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {}

AbortToken::~AbortToken() {
  if (fd_ >= 0) close(fd_);
}

bool AbortToken::raise(Status reason) {
  std::vector<std::function<void()>> callbacks;
  {
    std::lock_guard lock(mutex_);
    if (raised_.load(std::memory_order_relaxed)) return false;
    reason_ = std::move(reason);
    raised_.store(true, std::memory_order_release);
    callbacks = callbacks_;
  }
  const uint64_t one = 1;
  if (fd_ >= 0) [[maybe_unused]]
    const ssize_t written = write(fd_, &one, sizeof one);
  for (const auto& callback : callbacks) callback();
  return true;
}

Status AbortToken::reason() const {
  std::lock_guard lock(mutex_);
  return reason_;
}

void AbortToken::on_raise(std::function<void()> callback) {
  {
    std::lock_guard lock(mutex_);
    callbacks_.push_back(callback);
    if (!raised_.load(std::memory_order_relaxed)) return;
  }
  callback();
}

}  // namespace mk
