// SPDX-License-Identifier: MIT
// Where tests reach into the host executor: to hold one transfer back, to see tiles complete, and to take one
// wait out of the protocol and see a check fail.
#pragma once

#include <atomic>
#include <functional>

namespace mk {

struct HostHooks {
  // Asked on `rank` before a chunk of `source` leaves, by the copy, send and receive (forwarding) roles of the
  // all-gather, and before a partial of a chunk that `source` owns is computed: true holds it back for now.
  std::function<bool(int rank, int source, int chunk)> hold;
  // Rows of `source` are complete on `rank`: a tile row of C (all-gather), a chunk of C (reductions).
  std::function<void(int rank, int source)> tile_done;
  bool ignore_flags = false;     // chunk flags count as raised
  bool relaxed_flags = false;    // chunk flags are read without acquire
  bool skip_entry_wait = false;  // a launch ends without all entries
  // Do the waits of this role on this rank have a deadline? All have where this is empty.
  std::function<bool(int rank, const char* role)> has_deadline;
};

// Set by a test before its communicators exist, null otherwise.
extern std::atomic<const HostHooks*> host_hooks;

}  // namespace mk
