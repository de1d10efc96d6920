// SPDX-License-Identifier: MIT
// The GPUs of all ranks of one host, writing into each other's memory. Apart from the library, so that what it
// is measured with owes nothing to it.
#pragma once

#include <memory>
#include <string>

#include "operators.h"
#include "rank_group.h"
#include "roofline.h"

namespace perf {

class GpuRanks {
 public:
  virtual ~GpuRanks() = default;

  // Enqueues a kernel that ends on all GPUs within a few microseconds, and not before each rank has had time to
  // enqueue what it wants to begin then. Called by all ranks, after a barrier.
  virtual void line_up() = 0;

  // A RunError when a rank was not there in time in any line_up that has completed.
  virtual void require_all_came() = 0;

  // All ranks send at once, by 16-byte stores from every SM. Of two ranks and more.
  virtual LinkRate measure_link() = 0;

  // Called by all ranks before any destroys its own.
  virtual void disconnect() = 0;
};

// Called by all ranks, which get all the same: nullptr, and why in `problem`, where not every GPU can write to
// every other.
std::unique_ptr<GpuRanks> connect_gpus(const Context& context, RankGroup& group, std::string& problem);

}  // namespace perf
