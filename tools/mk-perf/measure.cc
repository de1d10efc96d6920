// SPDX-License-Identifier: MIT
#include "measure.h"

#include <algorithm>

#include "errors.h"

namespace perf {

Timing summarize(std::vector<double> samples) {
  std::sort(samples.begin(), samples.end());
  const size_t half = samples.size() / 2;
  const double median = samples.size() % 2 ? samples[half] : (samples[half - 1] + samples[half]) / 2;
  return {median, samples.front(), samples.back()};
}

std::vector<int> loops_of(const Schedule& schedule) {
  if (schedule.mode == Mode::kIsolated) return std::vector<int>(static_cast<size_t>(schedule.iterations), 1);
  const int num_loops = std::min(5, schedule.iterations);
  std::vector<int> loops(static_cast<size_t>(num_loops), schedule.iterations / num_loops);
  for (int extra = 0; extra < schedule.iterations % num_loops; ++extra) ++loops[static_cast<size_t>(extra)];
  return loops;
}

Timing measure(Problem& problem, int num_sets, const Context& context, RankGroup& group,
               const Schedule& schedule) {
  int launch = 0;
  const auto launch_next = [&] { problem.run(launch++ % num_sets); };
  for (int i = 0; i < schedule.warmup; ++i) launch_next();
  require(mk_comm_synchronize(context.comm, context.device->stream()), "mk_comm_synchronize", context.comm);

  std::vector<double> samples;
  for (const int launches : loops_of(schedule)) {
    group.barrier();
    const double us = context.device->time_us(context.comm, [&] {
      for (int i = 0; i < launches; ++i) launch_next();
    });
    samples.push_back(us / launches);
  }
  return summarize(group.maximum(samples));
}

}  // namespace perf
