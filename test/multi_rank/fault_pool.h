// SPDX-License-Identifier: MIT
// Faults one after another on a pool of processes: what happens, when, and what every survivor must have said.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "test/multi_rank/fault_worker.h"

namespace mk::test {

struct Report;

// cut: the network between the victim and its predecessor (of every rank, when there is no victim).
enum class FaultKind { kill, two_kills, abort, stop, cut };
inline constexpr int kFaultKinds = 5;
const char* name_of(FaultKind kind);

// One fault, all of it a function of (seed, index).
struct Fault {
  FaultKind kind = FaultKind::kill;
  bool during_init = false;
  Scene scene{};
  int victim = 0;
  int second_victim = -1;
  int delay_us = 0;  // from the ranks being at work (or from the id being there, during init)
  int second_delay_us = 0;

  std::string text() const;
};
Fault make_fault(uint64_t seed, uint64_t index, bool during_init = false);

struct FaultResult {
  std::vector<std::string> complaints;  // empty: all as promised
  int64_t slowest_survivor_ms = 0;      // from the fault to the error
  int64_t abort_ms = -1;
};

// The calling process has no other threads and uses no communicator.
class FaultPool {
 public:
  FaultPool() = default;
  // enter(rank) is called first in every process; cut(victim, true) cuts the network, cut(victim, false) mends
  // it.
  FaultPool(std::function<void(int)> enter, std::function<bool(int, bool)> cut)
      : enter_(std::move(enter)), cut_(std::move(cut)) {}
  FaultPool(const FaultPool&) = delete;
  FaultPool& operator=(const FaultPool&) = delete;
  ~FaultPool();

  FaultResult run(const Fault& fault);

 private:
  struct Worker {
    pid_t process = -1;
    int socket = -1;
  };

  bool start_worker(size_t slot);
  void end_worker(size_t slot, int signal);
  bool send_order(int rank, const Order& order) const;
  std::optional<Report> receive(int rank, int timeout_ms) const;
  bool begin(const Fault& fault, FaultResult& result);
  void strike(const Fault& fault, FaultResult& result);
  void check_survivor(const Fault& fault, int rank, int64_t since_ms, FaultResult& result);
  void resume_stopped(const Fault& fault, FaultResult& result);

  std::function<void(int)> enter_;
  std::function<bool(int, bool)> cut_;
  std::vector<Worker> workers_;  // by rank
};

}  // namespace mk::test
