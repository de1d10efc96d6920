// SPDX-License-Identifier: MIT
#pragma once

#include <vector>

#include "operators.h"
#include "options.h"
#include "rank_group.h"

namespace perf {

struct Timing {
  double median_us = 0;
  double min_us = 0;
  double max_us = 0;
};

// `samples` is not empty.
Timing summarize(std::vector<double> samples);

struct Schedule {
  Mode mode = Mode::kIsolated;
  int warmup = 0;
  int iterations = 1;
};

// How the timed launches are cut into loops that are timed as a whole: 1 each when isolated, else five loops.
std::vector<int> loops_of(const Schedule& schedule);

// Times real launches, each on the next set of buffers; a sample is the slowest rank's time a launch.
Timing measure(Problem& problem, int num_sets, const Context& context, RankGroup& group,
               const Schedule& schedule);

}  // namespace perf
