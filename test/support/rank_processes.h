// SPDX-License-Identifier: MIT
// Ranks that are processes of one test: forked children, and an all_gather over socket pairs between them.
#pragma once

#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

#include "lib/exchange.h"

namespace mk::test {

// A connection from each rank to each other, made before the ranks fork; blocks of up to 64 KiB.
class PairwiseExchange : public Exchange {
 public:
  PairwiseExchange(int rank, std::vector<int> sockets) : rank_(rank), sockets_(std::move(sockets)) {}
  ~PairwiseExchange() override {
    for (const int fd : sockets_) {
      if (fd >= 0) close(fd);
    }
  }
  int rank() const override { return rank_; }
  int nranks() const override { return static_cast<int>(sockets_.size()); }

  Result<std::vector<Bytes>> all_gather(std::span<const std::byte> mine, Deadline deadline,
                                        const char* what) override {
    std::vector<Bytes> blocks(sockets_.size());
    Status outcome;
    for (size_t peer = 0; peer < sockets_.size(); ++peer) {
      if (sockets_[peer] < 0) {
        blocks[peer].assign(mine.begin(), mine.end());
      } else if (send(sockets_[peer], mine.data(), mine.size(), MSG_NOSIGNAL) < 0) {
        // The others get their block all the same, and find out by themselves.
        if (outcome.ok()) outcome = lost(peer, what);
      }
    }
    MK_RETURN_IF_ERROR(outcome);
    for (size_t peer = 0; peer < sockets_.size(); ++peer) {
      if (sockets_[peer] < 0) continue;
      pollfd watched{sockets_[peer], POLLIN, 0};
      if (poll(&watched, 1, deadline.left_ms()) != 1) {
        return Status(MK_ERROR_TIMEOUT, format("%s: deadline passed; missing: rank %zu", what, peer));
      }
      Bytes block(64 << 10);
      const ssize_t length = recv(sockets_[peer], block.data(), block.size(), 0);
      if (length <= 0) return lost(peer, what);
      block.resize(static_cast<size_t>(length));
      blocks[peer] = std::move(block);
    }
    return blocks;
  }

 private:
  static Status lost(size_t peer, const char* what) {
    return Status(MK_ERROR_REMOTE, format("%s: rank %zu died", what, peer));
  }

  const int rank_;
  std::vector<int> sockets_;
};

// Runs body(exchange) for one rank on the calling thread, for several as a thread each; the last code that is
// not 0.
inline int run_ranks_here(int first_rank, int num_ranks, const std::vector<std::vector<int>>& sockets,
                          const std::function<int(Exchange&)>& body) {
  std::atomic<int> code{0};
  const auto run = [&](int rank) {
    PairwiseExchange exchange(rank, sockets[static_cast<size_t>(rank)]);
    const int own = body(exchange);
    if (own != 0) code = own;
  };
  if (num_ranks == 1) {
    run(first_rank);
    return code;
  }
  std::vector<std::thread> threads;
  for (int rank = first_rank; rank < first_rank + num_ranks; ++rank) threads.emplace_back(run, rank);
  for (std::thread& thread : threads) thread.join();
  return code;
}

// Runs body(exchange) as rank 0 .. nranks-1 in forked children of `ranks_per_process` ranks each (which divides
// nranks), and returns the children's exit codes, 128 + n for signal n. The calling process has no other
// threads. A child that outlives `limit_s` gets SIGALRM.
inline std::vector<int> run_rank_processes(int nranks, unsigned limit_s,
                                           const std::function<int(Exchange&)>& body,
                                           int ranks_per_process = 1) {
  const size_t count = static_cast<size_t>(nranks);
  std::vector<std::vector<int>> sockets(count, std::vector<int>(count, -1));
  for (size_t a = 0; a < count; ++a) {
    for (size_t b = a + 1; b < count; ++b) {
      int pair[2];
      if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) != 0) return {};
      sockets[a][b] = pair[0];
      sockets[b][a] = pair[1];
    }
  }
  std::vector<pid_t> children;
  for (int first = 0; first < nranks; first += ranks_per_process) {
    const pid_t child = fork();
    if (child == 0) {
      alarm(limit_s);
      for (int other = 0; other < nranks; ++other) {
        if (other >= first && other < first + ranks_per_process) continue;
        for (const int fd : sockets[static_cast<size_t>(other)]) {
          if (fd >= 0) close(fd);
        }
      }
      _exit(run_ranks_here(first, ranks_per_process, sockets, body));
    }
    children.push_back(child);
  }
  for (const auto& row : sockets) {
    for (const int fd : row) {
      if (fd >= 0) close(fd);
    }
  }
  std::vector<int> codes;
  for (const pid_t child : children) {
    int status = 0;
    while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
    }
    codes.push_back(WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status));
  }
  return codes;
}

}  // namespace mk::test
