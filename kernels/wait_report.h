// SPDX-License-Identifier: MIT
// What a wait whose deadline has passed tells the user; the same on both executors.
#pragma once

#include <cstdint>

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

}  // namespace mk
