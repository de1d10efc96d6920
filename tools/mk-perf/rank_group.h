// SPDX-License-Identifier: MIT
// What the ranks of a benchmark do together besides the operators: meet, and agree on the slowest.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "device.h"
#include "mkernel.h"

namespace perf {

class RankGroup {
 public:
  virtual ~RankGroup() = default;
  // Returns when every rank has called it.
  virtual void barrier() = 0;
  // Element by element the largest over all ranks, on every rank; all give the same number of values, none of
  // them NaN.
  virtual std::vector<double> maximum(const std::vector<double>& values) = 0;
  // What each rank gives, in rank order; `count` is the same on all, at most kMaxGathered.
  virtual std::vector<char> all_gather(const void* bytes, size_t count) = 0;
  static constexpr size_t kMaxGathered = 512;
};

struct SharedArea;

// Memory that the processes of `mk-perf -g` inherit. It has nothing to do with the library, so that neither the
// times nor the verdicts pass through what is measured.
class SharedMemory {
 public:
  explicit SharedMemory(int nranks);
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  int nranks() const { return nranks_; }
  mk_unique_id_t& unique_id();
  // Whoever waits, now or later, gets a RunError: a rank has ended.
  void abandon();

  void barrier(int rank);
  double* slot(int rank);
  static constexpr size_t kSlotValues = 256;

 private:
  SharedArea* area_;
  size_t bytes_;
  int nranks_;
};

std::unique_ptr<RankGroup> make_shared_memory_group(SharedMemory& memory, int rank);

// For ranks that a launcher started, perhaps on several machines: an all-gather through the communicator
// itself.
std::unique_ptr<RankGroup> make_communicator_group(mk_comm_t comm, int nranks, const DeviceOperations& device);

}  // namespace perf
