// SPDX-License-Identifier: MIT
#include "comparison.h"

#include <cmath>

#include "errors.h"
#include "watchdog.h"

namespace perf {
namespace {

// All rounds of one shape: many times what any takes that is not stuck. What waits inside an operator has
// shorter deadlines of its own.
constexpr std::chrono::seconds kDeadline{300};

}  // namespace

ShapeComparison::ShapeComparison(const Track& track, Equipment& equipment, Rotation& fused, Rotation* alone,
                                 Rotation* moving)
    : track_(track), fused_(fused), alone_(alone), moving_(moving) {
  if (!equipment.unfused()) return;
  std::string problem;
  pair_ = make_pair(*equipment.unfused(), problem);
  if (!pair_ && !problem.empty()) equipment.note(problem);
}

std::unique_ptr<UnfusedPair> ShapeComparison::make_pair(UnfusedLibraries& libraries,
                                                        std::string& problem) const {
  const Problem& fused = fused_.problem();
  if (const std::optional<UnfusedShape> shape = fused.unfused()) {
    std::vector<Operands> sets;
    for (int set = 0; set < fused_.num_sets(); ++set) sets.push_back(fused.operands(set));
    return libraries.make_pair(*shape, sets, problem);
  }
  if (const std::optional<UnfusedExperts> experts = fused.unfused_experts()) {
    std::vector<ExpertOperands> sets;
    for (int set = 0; set < fused_.num_sets(); ++set) sets.push_back(fused.expert_operands(set));
    return libraries.make_experts(*experts, sets, problem);
  }
  return nullptr;
}

Figures ShapeComparison::measure_all(const Schedule& schedule) {
  const bool on_gpus = track_.context.device->device == MK_DEVICE_CUDA;
  std::optional<Watchdog> watchdog;
  if (on_gpus)
    watchdog.emplace(kDeadline,
                     "rank " + std::to_string(track_.context.rank) + ": timing the launches of a shape");

  Figures figures;
  std::vector<Candidate> candidates;
  std::vector<std::optional<double>*> medians;
  const auto add = [&](std::optional<double>& figure, Candidate candidate) {
    candidates.push_back(std::move(candidate));
    medians.push_back(&figure);
  };
  const auto add_pair = [&](std::optional<double>& figure, bool every_round, void (UnfusedPair::*run)(int)) {
    add(figure, {track_.context.comm,
                 [this, run] { (pair_.get()->*run)(pair_launches_++ % fused_.num_sets()); }, every_round});
  };
  std::optional<double> fused_median;
  add(fused_median, fused_.candidate(true));
  // One rank alone has nothing to exchange.
  const bool several = track_.context.nranks > 1;
  if (pair_ && several) add_pair(figures.baseline_us, true, &UnfusedPair::run_pair);
  if (moving_ && alone_) {
    add(figures.unfused_us, {track_.context.comm,
                             [this] {
                               alone_->launch();
                               moving_->launch();
                             },
                             true});
    add(figures.moving_us, moving_->candidate(!on_gpus));
  }
  if (alone_) add(figures.alone_us, alone_->candidate(!on_gpus));
  if (pair_) add_pair(figures.cublas_us, !several, &UnfusedPair::run_product);
  if (pair_ && several) add_pair(figures.collective_us, false, &UnfusedPair::run_collective);

  const std::vector<Timing> timings = measure(candidates, track_, schedule);
  for (size_t i = 0; i < timings.size(); ++i) *medians[i] = timings[i].median_us;
  figures.fused = timings.front();
  if (!several) figures.alone_us = fused_median;
  if (track_.sensors) {
    const SensorReadings own = track_.sensors->take_medians();
    const std::vector<double> worst = track_.group.maximum({-own.sm_mhz.value_or(0), own.watts.value_or(0)});
    if (worst[0] < 0) figures.readings.sm_mhz = -worst[0];
    if (worst[1] > 0) figures.readings.watts = worst[1];
  }
  return figures;
}

std::optional<double> ShapeComparison::baseline_error() {
  if (!pair_) return std::nullopt;
  const Context& context = track_.context;
  if (context.accumulate) {
    fused_.problem().poison(0);
    pair_->take_output(0);
  }
  fused_.problem().run(0);
  require(mk_comm_synchronize(context.comm, context.device->stream()), "mk_comm_synchronize", context.comm);
  pair_->run_pair(0);
  require(mk_comm_synchronize(context.comm, context.device->stream()), "running the baseline", context.comm);
  const MatrixDifference difference = pair_->difference(0);
  if (difference.squared_reference == 0) return difference.squared_difference == 0 ? 0 : INFINITY;
  const double error = std::sqrt(difference.squared_difference / difference.squared_reference);
  return std::isfinite(error) ? error : INFINITY;
}

}  // namespace perf
