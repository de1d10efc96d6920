// SPDX-License-Identifier: MIT
// What a rank's network carries while all ranks send, as the operators use it.
#pragma once

#include "operators.h"
#include "rank_group.h"

namespace perf {

// GB/s, one direction, of the busiest rank: an all-gather with next to no product, of 256 MiB a rank, the
// fastest of several. Called by all ranks of a communicator of several nodes on GPUs.
double measure_network(const Context& context, RankGroup& group);

}  // namespace perf
