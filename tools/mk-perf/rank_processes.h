// SPDX-License-Identifier: MIT
// The ranks of `mk-perf -g`: processes of this machine that this one starts and watches.
#pragma once

#include <functional>
#include <string>
#include <vector>

namespace perf {

struct RankOutcome {
  int exit_code = 0;       // meaningless when killed_by is not 0
  int killed_by = 0;       // a signal
  bool straggler = false;  // we ended it, another having failed
  int order = 0;           // of ending
  std::string text;        // what it had to say
};

// Runs body(rank) in `nranks` forked processes; call before any thread exists. body returns the exit code and
// may put a sentence into its second argument. When one fails, on_failure runs here and the others have
// `grace_ms` to end before they are killed.
std::vector<RankOutcome> run_rank_processes(int nranks, int grace_ms,
                                            const std::function<int(int, std::string&)>& body,
                                            const std::function<void()>& on_failure);

// Prints to standard error which ranks failed and how, the first to fail first, and returns the exit code of
// the whole.
int report_failures(const std::vector<RankOutcome>& outcomes);

}  // namespace perf
