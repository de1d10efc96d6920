// SPDX-License-Identifier: MIT
#pragma once

#include <functional>
#include <vector>

#include "gpu_ranks.h"
#include "operators.h"
#include "options.h"
#include "rank_group.h"
#include "sensors.h"

namespace perf {

struct Timing {
  double median_us = 0;
  double min_us = 0;
  double max_us = 0;
};

// Of an even number the mean of the middle two; `samples` is not empty.
double median(std::vector<double> samples);

Timing summarize(const std::vector<double>& samples);

struct Schedule {
  Mode mode = Mode::kIsolated;
  int warmup = 0;
  int iterations = 1;
};

// How the timed launches are cut into loops that are timed as a whole: 1 each when isolated, else five loops.
std::vector<int> loops_of(const Schedule& schedule);

// Launches of one back-to-back loop on a GPU: about 10 ms of them, from 3 to 20.
int launches_a_loop(double launch_us);

// What is timed beside the others.
struct Candidate {
  mk_comm_t comm;                // that waits for it
  std::function<void()> launch;  // enqueues one, each on the next set of buffers
  bool every_round = true;       // else every second
};

// What the ranks meet by and are watched with.
struct Track {
  const Context& context;
  RankGroup& group;
  GpuRanks* gpus = nullptr;    // may be absent: then ranks meet on the host alone
  Sensors* sensors = nullptr;  // read now and then while the first candidate runs
};

// Times real launches of all candidates in turn, a round of one sample each, so that all see the same clocks
// and temperatures. A sample is the slowest rank's time a launch. On the host a round is a loop of loops_of; on
// GPUs there are schedule.iterations rounds, and back to back each sample is a loop of launches_a_loop.
std::vector<Timing> measure(const std::vector<Candidate>& candidates, const Track& track,
                            const Schedule& schedule);

// The host's median time, in microseconds, inside a launch that finds the stream empty.
double measure_host_us(const Candidate& candidate, const Track& track, int calls);

}  // namespace perf
