// SPDX-License-Identifier: MIT
// The command line.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "mkernel.h"
#include "operators.h"
#include "shape.h"

namespace perf {

enum class Mode {
  kIsolated,   // ranks meet, launch once, wait
  kBackToBack  // ranks meet, launch many times, wait once
};

const char* mode_name(Mode mode);

enum class Baseline {
  kAuto,  // on GPUs, where NCCL and cublasLt are there
  kNccl,
  kNone
};

struct Options {
  bool help = false;
  bool version = false;
  bool env = false;
  bool check_network = false;  // instead of an operator
  std::string operator_name;   // or "all"
  mk_device_t device = MK_DEVICE_AUTO;
  std::optional<int> local_ranks;  // -g
  std::optional<int> nodes;
  std::vector<Shape> shapes;
  std::string preset = "default";
  std::vector<Shape> only;  // keys and values; a shape has to agree with one of them
  Dtypes dtypes;
  mk_layout_t b_layout = MK_LAYOUT_KN;
  bool check = false;
  Baseline baseline = Baseline::kAuto;
  std::string nccl_path;
  std::string cublaslt_path;
  bool symmetric = false;
  bool accumulate = false;
  bool unfused = false;
  bool host_time = false;
  int host_limit_us = 0;  // 0: none
  int iterations = 20;
  int warmup = 3;
  std::vector<Mode> modes = {Mode::kIsolated};
  std::string json_path;
  std::string trace_path;
  std::string id_path;
};

// UsageError with a sentence for everything that is wrong without knowing the number of ranks.
Options parse_options(int argc, const char* const* argv);

std::string help_text();

// One operator and the shapes to run it with.
struct Selection {
  const Operator* op;
  std::vector<Shape> shapes;
};

// What to run on `nranks` ranks: complete, valid shapes. UsageError when there is nothing or something is
// wrong.
std::vector<Selection> select_work(const Options& options, int nranks);

// Node of each rank for --nodes, node-major; empty when not given. UsageError when the ranks do not split
// evenly.
std::vector<int32_t> node_of_rank(const Options& options, int nranks);

}  // namespace perf
