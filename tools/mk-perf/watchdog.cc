// SPDX-License-Identifier: MIT
#include "watchdog.h"

#include <cstdio>
#include <cstdlib>

#include "errors.h"

namespace perf {

Watchdog::Watchdog(std::chrono::seconds deadline, std::string what)
    : thread_([this, until = std::chrono::system_clock::now() + deadline, deadline, what = std::move(what)] {
        std::unique_lock lock(mutex_);
        if (changed_.wait_until(lock, until, [this] { return done_; })) return;
        std::fprintf(stderr, "mk-perf: %s has not ended within %lld s: gave up\n", what.c_str(),
                     static_cast<long long>(deadline.count()));
        std::_Exit(kExitFailure);
      }) {}

Watchdog::~Watchdog() {
  {
    const std::lock_guard lock(mutex_);
    done_ = true;
  }
  changed_.notify_one();
  thread_.join();
}

}  // namespace perf
