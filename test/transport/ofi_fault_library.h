// SPDX-License-Identifier: MIT
// libfabric with faults: its functions, and the tables in the objects that they make, stand in for the real
// ones.
#pragma once

#include <atomic>
#include <functional>

#include "transport/ofi/ofi_transport.h"
#include "transport/transport.h"

namespace mk::test {

enum class OfiOperation { none, write, message, receive };
// Which regions are in the memory of an imagined GPU.
enum class OnDevice { none, all, odd_ranks, every_other };

struct OfiFaults {
  // On every rank, all the time; seeded.
  int refuse_percent = 0;      // of posts and of looks at the queue: "try again"
  bool late = false;           // completions are held back and come in any order
  bool writes_lie = false;     // they complete at once and are done later
  bool no_descriptor = false;  // the queue cannot be waited for
  int taken_keys = 0;          // so often a region's key is refused
  OnDevice on_device = OnDevice::none;
  bool copies_lie = false;  // of a GPU: they are reported done and are done later
  // On rank 1, while it opens.
  int domain_error = 0;
  int memory_error = 0;  // of regions
  // On rank 0, once armed.
  OfiOperation failing = OfiOperation::none;  // the next one completes with `error`, ...
  int error = 0;
  int post_error = 0;                                 // ... each write is refused with it, ...
  int queue_error = 0;                                // ... or the queue itself fails
  bool copy_fails = false;                            // ... copies of a GPU cannot be started, ...
  bool swallow = false;                               // ... or nothing completes any more
  std::function<void(ofi::Message&, iovec&)> mutate;  // messages on their way out
  std::atomic<bool> armed{false};
};

// Of the backend below. Change them only while there is no endpoint, but for `armed`.
OfiFaults& ofi_faults();
void reset_ofi_faults();
const Backend& ofi_with_faults();

}  // namespace mk::test
