// SPDX-License-Identifier: MIT
// What one rank does: every operator and shape, checked and timed.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "options.h"
#include "rank_group.h"
#include "report.h"

namespace perf {

struct BenchmarkInput {
  const Options& options;
  mk_comm_t comm;
  RankGroup& group;
  const DeviceOperations& device;
  bool show_progress;
};

struct BenchmarkOutput {
  std::vector<Result> results;        // the same on every rank
  std::vector<std::string> problems;  // what this rank found wrong, a sentence each
  bool all_passed = true;             // on all ranks
  std::vector<std::string> notes;     // for the reader of the results
  Machine machine;                    // what was found out about it on the way
};

// A LibraryError of MK_ERROR_UNSUPPORTED when the library does not have what was asked for by name, or any
// operator at all.
BenchmarkOutput run_benchmark(const BenchmarkInput& input, const std::vector<Selection>& work);

}  // namespace perf
