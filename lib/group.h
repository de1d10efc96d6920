// SPDX-License-Identifier: MIT
#pragma once

#include <functional>

#include "status.h"

namespace mk::group {

// mk_group_start and mk_group_end of the calling thread.
void start();
Status end();
bool active();
// Records a host-collective call on `communicator` (a handle's value), to be carried out by end().
void defer(uint64_t communicator, std::function<Status()> call);
// A number for a communicator that has no handle yet.
uint64_t next_key();

}  // namespace mk::group
