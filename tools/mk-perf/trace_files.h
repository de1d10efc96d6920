// SPDX-License-Identifier: MIT
// --trace: a few launches of every shape with a trace, and the ranks' files joined to one.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "mkernel.h"
#include "rank_group.h"

namespace perf {

class TraceFiles {
 public:
  // `path` empty: no trace is asked for, and nothing is done.
  TraceFiles(std::string path, mk_comm_t comm, const mk_comm_info_t& info, RankGroup& group);
  // Removes the ranks' files where they were not joined.
  ~TraceFiles();
  TraceFiles(const TraceFiles&) = delete;
  TraceFiles& operator=(const TraceFiles&) = delete;

  // Called by every rank, when nothing runs: launches and traces. `wait` returns when the launches have
  // completed.
  void record(const std::function<void()>& launch, const std::function<void()>& wait);
  // Called by every rank at the end.
  void join();

 private:
  std::string part(int rank, int number) const;

  const std::string path_;
  const mk_comm_t comm_;
  const int rank_;
  const int nranks_;
  RankGroup& group_;
  int num_parts_ = 0;  // of each rank
};

// UsageError when it cannot be written: before any work.
void create_trace_file(const std::string& path);

// Joins files of mk_trace_stop. Throws RunError when one is not there or is not such a file.
std::string joined_traces(const std::vector<std::string>& paths);

}  // namespace perf
