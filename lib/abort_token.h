// SPDX-License-Identifier: MIT
#pragma once

#include <atomic>
#include <functional>
#include <mutex>
#include <vector>

#include "status.h"

namespace mk {

// The one word that ends everything on a communicator: raised once, by the user's abort or by the first fatal
// error, looked at by every wait. Thread-safe.
class AbortToken {
 public:
  AbortToken();
  ~AbortToken();
  AbortToken(const AbortToken&) = delete;
  AbortToken& operator=(const AbortToken&) = delete;

  // Raises the token with the reason that every wait will return. The first reason wins; true if this was it.
  bool raise(Status reason);
  bool raised() const { return raised_.load(std::memory_order_acquire); }
  // The reason, MK_SUCCESS while not raised.
  Status reason() const;
  // A descriptor that becomes and stays readable when raised: for poll(2) beside sockets. -1 when the
  // system had none to give; then waits fall back to looking every 100 ms.
  int fd() const { return fd_; }
  // Called by raise, in the raising thread, after the token is visible: wakes waits that do not poll fd().
  // If already raised it is called at once. Callbacks live as long as the token.
  void on_raise(std::function<void()> callback);

 private:
  mutable std::mutex mutex_;
  std::atomic<bool> raised_{false};
  Status reason_;
  int fd_;
  std::vector<std::function<void()>> callbacks_;
};

}  // namespace mk
