// SPDX-License-Identifier: MIT
// What a wait whose deadline has passed tells the user; the same on both executors.
#pragma once

#include <cstdint>
#include <vector>

#include "executor.h"

namespace mk {

struct WaitReport {
  mk_operator_t op;
  uint64_t epoch;
  int waiter_rank;
  const char* role;
  const char* object;  // "chunk", "partial", "entry"
  uint64_t index;
  int peer;  // the rank it comes from, or -1
  uint64_t seen;
  uint64_t expected;
  int cta = -1;  // of the waiter, on a GPU
};

// Reports MK_ERROR_TIMEOUT, which ends the communicator.
void report_timeout(const ExecutorContext& context, const WaitReport& wait);

// A peer that has not entered a launch.
struct AbsentPeer {
  int rank;
  uint64_t last_epoch;  // that it has entered; 0: none
};

// Tells the log whom a launch has waited for since wait_timeout_ms, and goes on waiting for: they live.
void log_absent(const ExecutorContext& context, mk_operator_t op, uint64_t epoch,
                const std::vector<AbsentPeer>& peers);

}  // namespace mk
