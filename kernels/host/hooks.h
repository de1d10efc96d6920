// SPDX-License-Identifier: MIT
// Where tests reach into the host executor: to hold one transfer back, to see tiles complete, and to take one
// wait out of the protocol and see a check fail.
#pragma once

#include <atomic>
#include <functional>

namespace mk {

struct HostHooks {
  // Asked by the copy and send roles of `rank` before a chunk leaves: true holds it back for now.
  std::function<bool(int rank, int source, int chunk)> hold;
  // A tile row of `source` is complete on `rank`.
  std::function<void(int rank, int source)> tile_done;
  bool ignore_flags = false;     // chunk flags count as raised
  bool relaxed_flags = false;    // chunk flags are read without acquire
  bool skip_entry_wait = false;  // a launch ends without all entries
};

// Set by a test before its communicators exist, null otherwise.
extern std::atomic<const HostHooks*> host_hooks;

}  // namespace mk
