// SPDX-License-Identifier: MIT
// A job of the C interface whose ranks are forked processes, which the test can stop and kill one by one.
#pragma once

#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "mkernel.h"
#include "test/support/process_state.h"

namespace mk::test {

// CLOCK_MONOTONIC, the same in all processes.
inline int64_t now_ms() {
  return std::chrono::duration_cast<std::chrono::milliseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// What a rank tells the test.
struct Report {
  enum Kind : int32_t { kId, kReady, kEnd };
  Kind kind = kEnd;
  mk_unique_id_t id{};
  mk_status_t status = MK_SUCCESS;  // of the call that ended the rank's work
  int64_t ended_ms = 0;             // when it returned
  int32_t blamed = -1;              // mk_async_error_t.rank
  mk_status_t destroyed = MK_SUCCESS;
  int64_t destroy_ms = 0;  // how long
  int32_t descriptors_left = 0;
  int32_t threads_left = 0;
  int32_t mappings_left = 0;
  int64_t abort_ms = -1;   // how long mk_comm_abort took, where it was called
  bool was_wrong = false;  // the sentence tells of a wrong result
  char sentence[600] = {};

  bool says(const std::string& text) const { return std::string(sentence).find(text) != std::string::npos; }
  std::string text() const { return std::string(mk_status_string(status)) + ": " + sentence; }
};

// A rank's end of its connection to the test.
class RankProcess {
 public:
  RankProcess(int rank, int socket) : rank_(rank), socket_(socket) {}
  int rank() const { return rank_; }
  void tell(const Report& report) const {
    [[maybe_unused]] const ssize_t sent = send(socket_, &report, sizeof report, MSG_NOSIGNAL);
  }
  // Rank 0 makes the id; the test hands it on.
  bool share_id(mk_unique_id_t* id) const {
    Report report;
    if (rank_ == 0) {
      if (mk_get_unique_id(id) != MK_SUCCESS) return false;
      report.kind = Report::kId;
      report.id = *id;
      tell(report);
      return true;
    }
    return recv(socket_, id, sizeof *id, 0) == sizeof *id;
  }

 private:
  const int rank_;
  const int socket_;
};

class ProcessJob {
 public:
  // Forks the ranks; the calling process has no other threads and uses no communicator. A rank that outlives
  // `limit_s` ends by SIGALRM.
  ProcessJob(int nranks, unsigned limit_s, const std::function<void(RankProcess&)>& body) {
    for (int rank = 0; rank < nranks; ++rank) {
      int pair[2];
      if (socketpair(AF_UNIX, SOCK_SEQPACKET, 0, pair) != 0) return;
      const pid_t child = fork();
      if (child == 0) {
        alarm(limit_s);
        close(pair[0]);
        for (const int fd : sockets_) close(fd);
        RankProcess self(rank, pair[1]);
        body(self);
        _exit(0);
      }
      close(pair[1]);
      sockets_.push_back(pair[0]);
      children_.push_back(child);
    }
  }
  ProcessJob(const ProcessJob&) = delete;
  ProcessJob& operator=(const ProcessJob&) = delete;
  ~ProcessJob() {
    for (size_t rank = 0; rank < children_.size(); ++rank) {
      if (children_[rank] > 0) kill(children_[rank], SIGKILL);
      wait_for(static_cast<int>(rank));
      close(sockets_[rank]);
    }
  }

  void send_signal(int rank, int signal) const { kill(children_[static_cast<size_t>(rank)], signal); }
  std::optional<Report> receive(int rank, int timeout_ms = 60000) const {
    const int fd = sockets_[static_cast<size_t>(rank)];
    pollfd readable{fd, POLLIN, 0};
    Report report;
    if (poll(&readable, 1, timeout_ms) != 1) return {};
    if (recv(fd, &report, sizeof report, 0) != sizeof report) return {};
    report.sentence[sizeof report.sentence - 1] = '\0';
    return report;
  }
  bool pass_id_on() const {
    const auto made = receive(0);
    if (!made || made->kind != Report::kId) return false;
    for (size_t rank = 1; rank < sockets_.size(); ++rank) {
      if (send(sockets_[rank], &made->id, sizeof made->id, MSG_NOSIGNAL) != sizeof made->id) return false;
    }
    return true;
  }
  // Its exit code, 128 + n for signal n; -1 when it has been asked for before.
  int wait_for(int rank) {
    pid_t& child = children_[static_cast<size_t>(rank)];
    if (child <= 0) return -1;
    int status = 0;
    while (waitpid(child, &status, 0) < 0 && errno == EINTR) continue;
    child = -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }
  bool started(int nranks) const { return static_cast<int>(children_.size()) == nranks; }

 private:
  std::vector<int> sockets_;
  std::vector<pid_t> children_;
};

// What a process holds, taken before the library is used and compared after.
class Holdings {
 public:
  Holdings() {
    // ThreadSanitizer starts a thread of its own beside the first.
    std::thread([] {}).join();
    usleep(1000);
    descriptors_ = open_descriptors();
    threads_ = running_threads();
    mappings_ = mappings("memfd");
  }
  void compare(Report& report) const {
    report.threads_left = running_threads_settle_at(threads_) ? 0 : running_threads() - threads_;
    report.descriptors_left = open_descriptors() - descriptors_;
    report.mappings_left = mappings("memfd") - mappings_;
  }

 private:
  int descriptors_ = 0;
  int threads_ = 0;
  int mappings_ = 0;
};

}  // namespace mk::test
