// SPDX-License-Identifier: MIT
// Rank and size as the launcher's environment has them, and the way the unique id travels.
#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <string>

#include "mkernel.h"

namespace perf {

struct Launcher {
  std::string name;  // "MK_RANK", "Open MPI", "Slurm", "torchrun"
  int rank = 0;
  int nranks = 1;
  int local_rank = 0;
  std::string job;  // tells this job from earlier ones; "" when the launcher has no such name
};

// nullopt without a launcher. A UsageError for variables that make no sense.
using Environment = std::function<const char*(const char*)>;
std::optional<Launcher> detect_launcher(const Environment& environment);

// 256 hexadecimal digits; a UsageError otherwise.
mk_unique_id_t parse_unique_id(const std::string& hex);

// Rank 0: removes what is left of an earlier job, then puts the id into place in one step, readable by this
// user only.
void publish_id(const std::string& path, const std::string& job, const mk_unique_id_t& id);

// Other ranks: waits for the file of this job. A file that names another job, or was written long ago, is what
// an earlier job left behind and is waited out; so is, for a moment, one that is older than this process and
// names no job.
mk_unique_id_t await_id(const std::string& path, const std::string& job, std::chrono::milliseconds deadline);

}  // namespace perf
