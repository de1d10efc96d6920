// SPDX-License-Identifier: MIT
// Jobs of the C interface for tests: ranks as threads of the test, or as forked processes.
#pragma once

#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "mkernel.h"
#include "transport_choice.h"

namespace mk::test {

struct RankJob {
  std::vector<int32_t> node_of_rank;  // one entry a rank
  int host_threads = 1;
  bool require_prepare = false;
  int64_t wait_timeout_ms = 0;  // 0: the library's default

  int nranks() const { return static_cast<int>(node_of_rank.size()); }
};

// One rank of a job, inside its body. A body returns at its first call that fails (`ok` answers false): the
// communicator is then aborted, so that the other ranks end too. Wrong data is recorded and the body goes on.
class RankSession {
 public:
  RankSession(const RankJob& job, int rank) : job_(job), rank_(rank) {}

  int rank() const { return rank_; }
  int nranks() const { return job_.nranks(); }
  mk_comm_t comm() const { return comm_; }
  // For a communicator that somebody else makes and ends.
  void use(mk_comm_t comm) { comm_ = comm; }

  bool ok(mk_status_t status, const std::string& what) {
    if (status == MK_SUCCESS) return true;
    fail(what + ": " + mk_status_string(status) + ": " + mk_get_last_error(comm_));
    broken_ = true;
    return false;
  }
  void fail(const std::string& text) {
    constexpr size_t kMost = 5;  // the first say it
    if (failures_.size() < kMost) failures_.push_back("rank " + std::to_string(rank_) + ": " + text);
  }
  const std::vector<std::string>& failures() const { return failures_; }

  void run(const mk_unique_id_t& id, const std::function<void(RankSession&)>& body) {
    mk_comm_config_t config = MK_COMM_CONFIG_INIT;
    config.device = MK_DEVICE_HOST;
    config.node_of_rank = job_.node_of_rank.data();
    config.transport = test_transport();
    config.host_threads = job_.host_threads;
    config.require_prepare = job_.require_prepare ? 1 : 0;
    config.wait_timeout_ms = job_.wait_timeout_ms;
    if (!ok(mk_comm_init(&comm_, &id, nranks(), rank_, &config), "mk_comm_init")) return;
    body(*this);
    if (broken_) {
      mk_comm_abort(comm_);
    } else {
      ok(mk_comm_finalize(comm_), "mk_comm_finalize");
    }
    ok(mk_comm_destroy(comm_), "mk_comm_destroy");
  }

 private:
  const RankJob& job_;
  const int rank_;
  mk_comm_t comm_ = nullptr;
  bool broken_ = false;
  std::vector<std::string> failures_;
};

// Runs body once a rank and returns what failed anywhere; empty: nothing.
inline std::vector<std::string> run_rank_threads(const RankJob& job,
                                                 const std::function<void(RankSession&)>& body) {
  mk_unique_id_t id;
  if (mk_get_unique_id(&id) != MK_SUCCESS)
    return {std::string("mk_get_unique_id: ") + mk_get_last_error(nullptr)};
  std::vector<RankSession> sessions;
  for (int rank = 0; rank < job.nranks(); ++rank) sessions.emplace_back(job, rank);
  std::vector<std::thread> threads;
  for (RankSession& session : sessions) threads.emplace_back([&] { session.run(id, body); });
  for (std::thread& thread : threads) thread.join();
  std::vector<std::string> failures;
  for (const RankSession& session : sessions) {
    failures.insert(failures.end(), session.failures().begin(), session.failures().end());
  }
  return failures;
}

namespace forked {

inline bool read_all(int fd, void* data, size_t bytes) {
  auto* next = static_cast<char*>(data);
  while (bytes > 0) {
    const ssize_t got = read(fd, next, bytes);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return false;
    next += got;
    bytes -= static_cast<size_t>(got);
  }
  return true;
}

inline void write_text(int fd, const std::string& text) {
  size_t done = 0;
  while (done < text.size()) {
    const ssize_t written = write(fd, text.data() + done, text.size() - done);
    if (written <= 0) return;
    done += static_cast<size_t>(written);
  }
}

// Rank 0's process makes the id, and hands it to the others through their pipes.
inline void run_child(const RankJob& job, int rank, const std::vector<int>& id_readers,
                      const std::vector<int>& id_writers, int report,
                      const std::function<void(RankSession&)>& body) {
  RankSession session(job, rank);
  mk_unique_id_t id;
  if (rank == 0) {
    if (!session.ok(mk_get_unique_id(&id), "mk_get_unique_id")) return;
    for (int other = 1; other < job.nranks(); ++other) {
      if (write(id_writers[static_cast<size_t>(other)], &id, sizeof id) != sizeof id)
        session.fail("the id's pipe");
    }
  } else if (!read_all(id_readers[static_cast<size_t>(rank)], &id, sizeof id)) {
    return write_text(report, "rank " + std::to_string(rank) + ": got no id\n");
  }
  session.run(id, body);
  for (const std::string& failure : session.failures()) write_text(report, failure + "\n");
}

}  // namespace forked

// The same with a forked child a rank, which is killed after limit_s. The calling process has used no
// communicator and has no other threads. A line that a body writes to `report` is a failure.
inline std::vector<std::string> run_rank_processes(const RankJob& job, unsigned limit_s,
                                                   const std::function<void(RankSession&)>& body) {
  const auto nranks = static_cast<size_t>(job.nranks());
  std::vector<int> readers(nranks), writers(nranks);
  int report[2];
  if (pipe(report) != 0) return {"no pipe"};
  for (size_t rank = 0; rank < nranks; ++rank) {
    int ends[2];
    if (pipe(ends) != 0) return {"no pipe"};
    readers[rank] = ends[0];
    writers[rank] = ends[1];
  }
  std::vector<pid_t> children;
  std::fflush(nullptr);  // or every child prints what is buffered
  for (int rank = 0; rank < job.nranks(); ++rank) {
    const pid_t child = fork();
    if (child == 0) {
      alarm(limit_s);
      close(report[0]);
      if (rank != 0) {
        for (const int fd : writers) close(fd);
      }
      forked::run_child(job, rank, readers, writers, report[1], body);
      std::exit(0);  // not _exit: the library joins the thread of a root
    }
    children.push_back(child);
  }
  close(report[1]);
  for (const int fd : readers) close(fd);
  for (const int fd : writers) close(fd);
  std::string text;
  char part[512];
  for (ssize_t got; (got = read(report[0], part, sizeof part)) > 0 || (got < 0 && errno == EINTR);) {
    if (got > 0) text.append(part, static_cast<size_t>(got));
  }
  close(report[0]);
  std::vector<std::string> failures;
  for (size_t begin = 0, end; (end = text.find('\n', begin)) != std::string::npos; begin = end + 1) {
    failures.push_back(text.substr(begin, end - begin));
  }
  for (size_t rank = 0; rank < nranks; ++rank) {
    int status = 0;
    while (waitpid(children[rank], &status, 0) < 0 && errno == EINTR) {
    }
    if (status != 0)
      failures.push_back("rank " + std::to_string(rank) + ": its process ended with " +
                         std::to_string(WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status)));
  }
  return failures;
}

inline std::string join_lines(const std::vector<std::string>& lines) {
  std::string text;
  for (const std::string& line : lines) text += line + "\n";
  return text;
}

}  // namespace mk::test
