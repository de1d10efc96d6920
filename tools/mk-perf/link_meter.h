// SPDX-License-Identifier: MIT
// Latency and bandwidth of the path between two ranks, by puts as the operators use them.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "transport/endpoint.h"

namespace perf {

struct LinkFigures {
  double latency_us = 0;  // half a round trip of puts of 8 bytes, median
  double gigabytes = 0;   // a second, of the best of several bursts of puts of 1 MiB
};

class LinkMeter {
 public:
  // Collective.
  static mk::Result<std::unique_ptr<LinkMeter>> create(const mk::Topology& topology, mk::Exchange& exchange,
                                                       mk::AbortToken& abort, mk::Deadline deadline);
  ~LinkMeter();

  const char* backend() const { return endpoint_->backend(); }
  // One of the pair measures while the other answers.
  mk::Result<LinkFigures> measure(int peer);
  mk::Status answer(int peer);

 private:
  explicit LinkMeter(mk::AbortToken& abort);
  mk::Status put(int peer, uint32_t bytes, uint32_t signal);
  mk::Status await(int peer, uint32_t signal, uint64_t more);
  template <class CONDITION>
  mk::Status wait(int peer, const CONDITION& condition);

  mk::AbortToken& abort_;
  std::vector<std::byte> memory_;
  uint32_t region_ = 0;
  std::vector<uint64_t> seen_;  // of each signal
  std::mutex mutex_;
  std::condition_variable event_;
  std::unique_ptr<mk::Endpoint> endpoint_;
};

}  // namespace perf
