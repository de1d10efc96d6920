// SPDX-License-Identifier: MIT
#include "rank_processes.h"

#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>

#include "errors.h"

namespace perf {
namespace {

using Clock = std::chrono::steady_clock;

// The read end of `pipe` sees the end of the child, however it comes, because the child alone holds the write
// end.
struct Child {
  pid_t pid = -1;
  int pipe = -1;
};

[[noreturn]] void run_child(int rank, pid_t parent, int write_end,
                            const std::function<int(int, std::string&)>& body) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) std::_Exit(kExitFailure);
  std::string text;
  const int code = body(rank, text);
  std::fflush(nullptr);
  for (size_t sent = 0; sent < text.size();) {
    const ssize_t count = write(write_end, text.data() + sent, text.size() - sent);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) break;
    sent += static_cast<size_t>(count);
  }
  std::exit(code);
}

Child start_child(int rank, const std::vector<Child>& siblings,
                  const std::function<int(int, std::string&)>& body) {
  int ends[2];
  if (pipe(ends) != 0) throw RunError(std::string("pipe: ") + std::strerror(errno));
  const pid_t parent = getpid();
  const pid_t pid = fork();
  if (pid < 0) throw RunError(std::string("fork: ") + std::strerror(errno));
  if (pid == 0) {
    close(ends[0]);
    for (const Child& sibling : siblings) close(sibling.pipe);
    run_child(rank, parent, ends[1], body);
  }
  close(ends[1]);
  return {pid, ends[0]};
}

void kill_children(const std::vector<Child>& children) {
  for (const Child& child : children) {
    if (child.pipe >= 0) kill(child.pid, SIGKILL);
  }
}

// Reads what the child says; at its end collects it. True when it has ended.
bool attend(Child& child, RankOutcome& outcome) {
  char buffer[4096];
  const ssize_t count = read(child.pipe, buffer, sizeof buffer);
  if (count < 0 && errno == EINTR) return false;
  if (count > 0) {
    outcome.text.append(buffer, static_cast<size_t>(count));
    return false;
  }
  close(child.pipe);
  child.pipe = -1;
  int status = 0;
  while (waitpid(child.pid, &status, 0) < 0 && errno == EINTR) {
  }
  if (WIFSIGNALED(status)) outcome.killed_by = WTERMSIG(status);
  if (WIFEXITED(status)) outcome.exit_code = WEXITSTATUS(status);
  return true;
}

bool failed(const RankOutcome& outcome) { return outcome.exit_code != 0 || outcome.killed_by != 0; }

std::string describe(const RankOutcome& outcome) {
  if (outcome.straggler) return "did not end after another rank had failed, and was killed";
  if (outcome.killed_by) {
    return "killed by signal " + std::to_string(outcome.killed_by) + " (" + strsignal(outcome.killed_by) + ")";
  }
  return outcome.text;
}

}  // namespace

std::vector<RankOutcome> run_rank_processes(int nranks, int grace_ms,
                                            const std::function<int(int, std::string&)>& body,
                                            const std::function<void()>& on_failure) {
  std::vector<Child> children;
  try {
    for (int rank = 0; rank < nranks; ++rank) children.push_back(start_child(rank, children, body));
  } catch (...) {
    kill_children(children);
    throw;
  }
  std::vector<RankOutcome> outcomes(children.size());
  Clock::time_point deadline = Clock::time_point::max();
  for (int ended = 0; ended < nranks;) {
    std::vector<pollfd> fds;
    for (const Child& child : children) fds.push_back({child.pipe, POLLIN, 0});
    const bool in_grace = deadline != Clock::time_point::max();
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
    const int ready =
        poll(fds.data(), fds.size(), in_grace ? static_cast<int>(std::max<int64_t>(left, 0)) : -1);
    if (ready == 0) {
      for (size_t rank = 0; rank < children.size(); ++rank) outcomes[rank].straggler = children[rank].pipe >= 0;
      kill_children(children);
      deadline = Clock::time_point::max();
      continue;
    }
    for (size_t rank = 0; ready > 0 && rank < children.size(); ++rank) {
      if (!fds[rank].revents || !attend(children[rank], outcomes[rank])) continue;
      outcomes[rank].order = ended++;
      if (!failed(outcomes[rank]) || in_grace || outcomes[rank].straggler) continue;
      on_failure();
      deadline = std::min(deadline, Clock::now() + std::chrono::milliseconds(grace_ms));
    }
  }
  return outcomes;
}

int report_failures(const std::vector<RankOutcome>& outcomes) {
  std::vector<size_t> by_order(outcomes.size());
  std::iota(by_order.begin(), by_order.end(), size_t{0});
  std::sort(by_order.begin(), by_order.end(),
            [&](size_t a, size_t b) { return outcomes[a].order < outcomes[b].order; });
  const bool same = std::all_of(outcomes.begin(), outcomes.end(), [&](const RankOutcome& other) {
    return describe(other) == describe(outcomes.front());
  });
  bool any = false;
  bool only_usage = true;
  for (const size_t rank : by_order) {
    if (!failed(outcomes[rank])) continue;
    if (outcomes[rank].killed_by || outcomes[rank].exit_code != kExitUsage) only_usage = false;
    const std::string what = describe(outcomes[rank]);
    if (!what.empty() && same && !any) {
      std::fprintf(stderr, "mk-perf: %s%s\n", outcomes[rank].killed_by ? "every rank was " : "", what.c_str());
    }
    if (!what.empty() && !same) {
      std::fprintf(stderr, "mk-perf: rank %zu of %zu: %s\n", rank, outcomes.size(), what.c_str());
    }
    any = true;
  }
  return !any ? kExitSuccess : only_usage ? kExitUsage : kExitFailure;
}

}  // namespace perf
