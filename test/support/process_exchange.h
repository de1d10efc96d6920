// SPDX-License-Identifier: MIT
// The bootstrap's all_gather for ranks that are processes which one test has forked: each has a socket to the
// test, which gathers the blocks of a round and hands all of them to everyone.
#pragma once

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "lib/exchange.h"

namespace mk::test {

// All of `bytes`, or false at the deadline or when the other end is gone.
inline bool send_all(int fd, const void* data, size_t bytes) {
  const char* next = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t sent = send(fd, next, bytes, MSG_NOSIGNAL);
    if (sent <= 0) return false;
    next += sent;
    bytes -= static_cast<size_t>(sent);
  }
  return true;
}

inline bool receive_all(int fd, void* data, size_t bytes, Deadline deadline) {
  char* next = static_cast<char*>(data);
  while (bytes > 0) {
    pollfd readable{fd, POLLIN, 0};
    if (poll(&readable, 1, deadline.left_ms()) <= 0) return false;
    const ssize_t got = recv(fd, next, bytes, 0);
    if (got <= 0) return false;
    next += got;
    bytes -= static_cast<size_t>(got);
  }
  return true;
}

// The end of one forked rank.
class ProcessExchange : public Exchange {
 public:
  ProcessExchange(int fd, int rank, int nranks) : fd_(fd), rank_(rank), nranks_(nranks) {}
  int rank() const override { return rank_; }
  int nranks() const override { return nranks_; }

  Result<std::vector<Bytes>> all_gather(std::span<const std::byte> mine, Deadline deadline,
                                        const char* what) override {
    const uint64_t size = mine.size();
    std::vector<Bytes> all(static_cast<size_t>(nranks_));
    bool ok = send_all(fd_, &size, sizeof size) && send_all(fd_, mine.data(), mine.size());
    for (Bytes& block : all) {
      uint64_t bytes = 0;
      ok = ok && receive_all(fd_, &bytes, sizeof bytes, deadline);
      if (!ok) break;
      block.resize(bytes);
      ok = receive_all(fd_, block.data(), bytes, deadline);
    }
    if (!ok) return Status(MK_ERROR_TIMEOUT, format("%s: a rank did not come", what));
    return all;
  }

 private:
  const int fd_;
  const int rank_;
  const int nranks_;
};

// The test's end: serves rounds until every rank has closed its socket. A rank that closes early is left out,
// and so the others' rounds fail.
class ProcessExchangeHub {
 public:
  explicit ProcessExchangeHub(std::vector<int> fds) : fds_(std::move(fds)) {}

  void serve(Deadline deadline) {
    std::vector<Bytes> blocks(fds_.size());
    while (true) {
      for (size_t rank = 0; rank < fds_.size(); ++rank) {
        uint64_t bytes = 0;
        if (!receive_all(fds_[rank], &bytes, sizeof bytes, deadline) || bytes > Exchange::kMaxBlockBytes)
          return;
        blocks[rank].resize(bytes);
        if (!receive_all(fds_[rank], blocks[rank].data(), bytes, deadline)) return;
      }
      for (const int fd : fds_) {
        for (const Bytes& block : blocks) {
          const uint64_t bytes = block.size();
          if (!send_all(fd, &bytes, sizeof bytes) || !send_all(fd, block.data(), bytes)) return;
        }
      }
    }
  }

 private:
  std::vector<int> fds_;
};

}  // namespace mk::test
