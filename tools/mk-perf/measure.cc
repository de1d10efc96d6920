// SPDX-License-Identifier: MIT
#include "measure.h"

#include <algorithm>
#include <chrono>

#include "errors.h"

namespace perf {
namespace {

constexpr double kLoopUs = 10000;
constexpr int kLeastLaunches = 3;
constexpr int kMostLaunches = 20;
constexpr size_t kRoundsAReading = 4;  // the driver takes its time to answer

void synchronize(const Candidate& candidate, const Track& track) {
  require(mk_comm_synchronize(candidate.comm, track.context.device->stream()), "mk_comm_synchronize",
          candidate.comm);
}

// A launch's share of a loop on this rank.
double loop_us(const Candidate& candidate, const Track& track, int launches, bool watch) {
  track.group.barrier();
  if (track.gpus) track.gpus->line_up();
  const double us = track.context.device->time_us(
      candidate.comm,
      [&] {
        for (int i = 0; i < launches; ++i) candidate.launch();
      },
      [&] {
        if (watch && track.sensors) track.sensors->sample();
      });
  return us / launches;
}

// [candidate][round]: how many launches its sample has, 0 for none.
using Rounds = std::vector<std::vector<int>>;

Rounds rounds_of(const std::vector<Candidate>& candidates, const Track& track, const Schedule& schedule) {
  Rounds rounds;
  const bool on_gpus = track.context.device->device == MK_DEVICE_CUDA;
  for (const Candidate& candidate : candidates) {
    std::vector<int> loops = loops_of(schedule);
    if (on_gpus && schedule.mode == Mode::kBackToBack) {
      const double once = track.group.maximum({loop_us(candidate, track, 1, false)})[0];
      loops.assign(static_cast<size_t>(schedule.iterations), launches_a_loop(once));
    }
    for (size_t round = 1; !candidate.every_round && round < loops.size(); round += 2) loops[round] = 0;
    rounds.push_back(std::move(loops));
  }
  return rounds;
}

}  // namespace

double median(std::vector<double> samples) {
  std::sort(samples.begin(), samples.end());
  const size_t half = samples.size() / 2;
  return samples.size() % 2 ? samples[half] : (samples[half - 1] + samples[half]) / 2;
}

Timing summarize(const std::vector<double>& samples) {
  const auto [least, most] = std::minmax_element(samples.begin(), samples.end());
  return {median(samples), *least, *most};
}

std::vector<int> loops_of(const Schedule& schedule) {
  if (schedule.mode == Mode::kIsolated) return std::vector<int>(static_cast<size_t>(schedule.iterations), 1);
  const int num_loops = std::min(5, schedule.iterations);
  std::vector<int> loops(static_cast<size_t>(num_loops), schedule.iterations / num_loops);
  for (int extra = 0; extra < schedule.iterations % num_loops; ++extra) ++loops[static_cast<size_t>(extra)];
  return loops;
}

int launches_a_loop(double launch_us) {
  const double launches = kLoopUs / std::max(launch_us, 1.0);
  return static_cast<int>(std::clamp<double>(launches, kLeastLaunches, kMostLaunches));
}

std::vector<Timing> measure(const std::vector<Candidate>& candidates, const Track& track,
                            const Schedule& schedule) {
  for (const Candidate& candidate : candidates) {
    for (int i = 0; i < schedule.warmup; ++i) candidate.launch();
    synchronize(candidate, track);
  }
  const Rounds rounds = rounds_of(candidates, track, schedule);
  std::vector<std::vector<double>> samples(candidates.size());
  for (size_t round = 0; round < rounds.front().size(); ++round) {
    for (size_t i = 0; i < candidates.size(); ++i) {
      if (!rounds[i][round]) continue;
      const bool watch = i == 0 && round % kRoundsAReading == 0;
      samples[i].push_back(loop_us(candidates[i], track, rounds[i][round], watch));
    }
  }
  if (track.gpus) track.gpus->require_all_came();
  std::vector<Timing> timings;
  for (const std::vector<double>& own : samples) timings.push_back(summarize(track.group.maximum(own)));
  return timings;
}

double measure_host_us(const Candidate& candidate, const Track& track, int calls) {
  using Clock = std::chrono::steady_clock;
  std::vector<double> times;
  for (int call = 0; call < calls; ++call) {
    synchronize(candidate, track);
    const Clock::time_point start = Clock::now();
    candidate.launch();
    times.push_back(std::chrono::duration<double, std::micro>(Clock::now() - start).count());
  }
  synchronize(candidate, track);
  return track.group.maximum({median(times)})[0];
}

}  // namespace perf
