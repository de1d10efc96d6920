// SPDX-License-Identifier: MIT
// The results, as a table and as JSON.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "machine.h"
#include "measure.h"
#include "operators.h"

namespace perf {

// The verdict over all ranks.
struct CheckResult {
  bool passed = false;
  bool exact = false;
  bool whole = true;
  double relative_error = 0;
};

// One line; docs/performance.md has the formula of every figure. An absent one was not measured.
struct Result {
  std::string operator_name;
  std::string device;
  int ranks = 1;
  int nodes = 1;
  Shape shape;
  std::string dtype;
  Mode mode = Mode::kIsolated;
  std::optional<CheckResult> check;
  Timing fused;
  std::optional<double> baseline_us;
  std::optional<double> gemm_us;
  std::optional<double> alone_us;
  std::optional<double> collective_us;
  std::optional<double> roofline_us;
  double tflops = 0;  // of a rank
  std::optional<double> cublas_us;
  std::optional<double> link_us;
  std::optional<double> network_us;
  std::optional<double> unfused_us;
  std::optional<double> moving_us;
  std::optional<double> host_us;
  std::optional<double> sm_mhz;
  std::optional<double> watts;
};

// The results of schedule.mode, which may be none.
std::string table_text(const std::vector<Result>& results, const Schedule& schedule);
// What was found out besides them, a line each.
std::string notes_text(const Machine& machine, const std::vector<std::string>& notes);
std::string json_text(const std::vector<Result>& results, const Machine& machine, const std::string& version);

// "bf16", or "bf16->fp32" where the output's type differs.
std::string dtypes_text(const Dtypes& dtypes);

}  // namespace perf
