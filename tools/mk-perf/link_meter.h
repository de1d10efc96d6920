// SPDX-License-Identifier: MIT
// Latency and bandwidth of the path between two ranks, by puts as the operators use them.
#pragma once

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "transport/transport.h"

namespace perf {

struct LinkFigures {
  double latency_us = 0;  // half a round trip of puts of 8 bytes, median
  double gigabytes = 0;   // a second, of the best of several bursts of puts of 1 MiB
};

// One of two ranks that are called 0 and 1, on two nodes.
class LinkMeter {
 public:
  // Of one direction, set-up included, and of a wait in which nothing comes.
  static constexpr std::chrono::seconds kMostTime{30}, kPatience{10};

  // Collective between the two. `nics`: EndpointOptions. `peer_gave_up` is asked now and then while nothing
  // comes.
  static mk::Result<std::unique_ptr<LinkMeter>> create(const mk::Backend& backend, mk::Exchange& exchange,
                                                       std::vector<std::string> nics,
                                                       std::function<bool()> peer_gave_up);
  ~LinkMeter();

  // One of the two measures while the other answers.
  mk::Result<LinkFigures> measure();
  mk::Status answer();
  // Ends all waits, and the link without a farewell. Any thread.
  void abort(mk::Status reason) { abort_.raise(std::move(reason)); }

 private:
  LinkMeter(int rank, std::function<bool()> peer_gave_up);
  mk::Status put(uint32_t bytes, uint32_t signal);
  mk::Status await(uint32_t signal, uint64_t more);
  template <class CONDITION>
  mk::Status wait(const CONDITION& condition);

  const int peer_;
  const std::function<bool()> peer_gave_up_;
  mk::AbortToken abort_;
  mk::Deadline deadline_;  // of the direction that is being measured
  std::vector<std::byte> memory_;
  uint32_t region_ = 0;
  std::vector<uint64_t> seen_;  // of each signal
  std::mutex mutex_;
  std::condition_variable event_;
  std::unique_ptr<mk::Endpoint> endpoint_;
};

}  // namespace perf
