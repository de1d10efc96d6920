// SPDX-License-Identifier: MIT
// One shape's timed runs: the operator and all that it is compared with, in turn.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "equipment.h"
#include "measure.h"
#include "operators.h"

namespace perf {

// Times in microseconds; absent ones were not measured.
struct Figures {
  Timing fused;
  std::optional<double> baseline_us;
  std::optional<double> alone_us;  // the operator among one rank
  std::optional<double> cublas_us;
  std::optional<double> collective_us;
  std::optional<double> unfused_us;  // the operator among one rank, and what moves its data
  std::optional<double> moving_us;   // the latter alone
  SensorReadings readings;           // of the slowest clock and the highest power of all ranks
};

// A problem with its buffers, whose launches go through them in turn.
class Rotation {
 public:
  Rotation(mk_comm_t comm, std::unique_ptr<Problem> problem, int num_sets)
      : comm_(comm), problem_(std::move(problem)), num_sets_(num_sets) {
    problem_->allocate(num_sets);
  }
  void launch() { problem_->run(launches_++ % num_sets_); }
  Candidate candidate(bool every_round) {
    return {comm_, [this] { launch(); }, every_round};
  }
  Problem& problem() { return *problem_; }
  int num_sets() const { return num_sets_; }
  int launches() const { return launches_; }

 private:
  mk_comm_t comm_;
  std::unique_ptr<Problem> problem_;
  int num_sets_;
  int launches_ = 0;
};

class ShapeComparison {
 public:
  // `alone` is the operator among one rank, `moving` the operator with next to no product; each may be nullptr.
  ShapeComparison(const Track& track, Equipment& equipment, Rotation& fused, Rotation* alone, Rotation* moving);

  Figures measure_all(const Schedule& schedule);

  // How the baseline goes about it where it has a choice, else "".
  std::string baseline_description() const { return pair_ ? pair_->description() : std::string(); }

  // How far the baseline's result is from the operator's, |difference| / |operator's|, of this rank; they have
  // the same inputs. Nothing without a baseline.
  std::optional<double> baseline_error();

 private:
  std::unique_ptr<UnfusedPair> make_pair(UnfusedLibraries& libraries, std::string& problem) const;

  Track track_;
  Rotation& fused_;
  Rotation* alone_;
  Rotation* moving_;
  std::unique_ptr<UnfusedPair> pair_;
  int pair_launches_ = 0;
};

}  // namespace perf
