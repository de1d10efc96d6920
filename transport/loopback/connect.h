// SPDX-License-Identifier: MIT
// Connected, mutually authenticated sockets to every rank of another node, as long as all are on one host.
#pragma once

#include <unistd.h>

#include <utility>
#include <vector>

#include "../../lib/abort_token.h"
#include "../../lib/exchange.h"
#include "../../lib/topology.h"

namespace mk::loopback {

// Owns a descriptor.
class Channel {
 public:
  Channel() = default;
  explicit Channel(int fd) : fd_(fd) {}
  Channel(Channel&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Channel& operator=(Channel&& other) noexcept {
    if (this != &other) {
      reset();
      fd_ = std::exchange(other.fd_, -1);
    }
    return *this;
  }
  ~Channel() { reset(); }

  bool open() const { return fd_ >= 0; }
  int fd() const { return fd_; }
  void reset() {
    if (fd_ >= 0) close(std::exchange(fd_, -1));
  }

 private:
  int fd_ = -1;
};

// By rank; closed for ranks of this node. Collective: fails on every rank or on none, also when one comes with
// an error.
Result<std::vector<Channel>> connect_peers(const Topology& topology, Exchange& exchange,
                                           const AbortToken& abort, Status ready, Deadline deadline);

}  // namespace mk::loopback
