// SPDX-License-Identifier: MIT
// What a run on GPUs measures with besides the library: made once, used by every shape. On the host executor
// all of it is absent.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "gpu_ranks.h"
#include "machine.h"
#include "options.h"
#include "rank_group.h"
#include "sensors.h"
#include "unfused_pair.h"

namespace perf {

class Equipment {
 public:
  // Called by all ranks. A UsageError when --baseline nccl asks for what is not there.
  Equipment(const Context& context, RankGroup& group, const Options& options, int num_nodes);

  // Called by all ranks when the last measurement is over.
  void disconnect();

  GpuRanks* gpus() const { return gpus_.get(); }
  Sensors& sensors() { return sensors_; }
  UnfusedLibraries* unfused() const { return unfused_.get(); }
  const std::optional<LinkRate>& link() const { return link_; }
  const std::optional<double>& network() const { return network_; }  // GB/s of a rank

  void note(const std::string& sentence);                           // once each
  const std::vector<std::string>& notes() const { return notes_; }  // for the reader of the results
  void describe(Machine& machine) const;

 private:
  void connect(const Context& context, RankGroup& group, int num_nodes);

  Sensors sensors_;
  std::unique_ptr<GpuRanks> gpus_;
  std::unique_ptr<UnfusedLibraries> unfused_;
  std::optional<LinkRate> link_;
  std::optional<double> network_;
  std::vector<std::string> notes_;
};

}  // namespace perf
