// SPDX-License-Identifier: MIT
#include "equipment.h"

#include <algorithm>
#include <cstdio>

#include "errors.h"
#include "network_rate.h"

namespace perf {

Equipment::Equipment(const Context& context, RankGroup& group, const Options& options, int num_nodes)
    : sensors_(context.device->pci_bus_id()) {
  if (context.device->device != MK_DEVICE_CUDA) return;
  connect(context, group, num_nodes);
  if (options.baseline == Baseline::kNone) return;
  std::string problem;
  unfused_ = load_unfused_libraries(context, group, {options.nccl_path, options.cublaslt_path}, problem);
  if (unfused_) return;
  if (options.baseline == Baseline::kNccl) throw UsageError("--baseline nccl: " + problem);
  note("no baseline: " + problem);
}

void Equipment::connect(const Context& context, RankGroup& group, int num_nodes) {
  std::string problem;
  gpus_ = connect_gpus(context, group, problem);
  if (!gpus_) {
    note("ranks meet on the host alone and no link was measured: " + problem);
    return;
  }
  if (context.nranks == 1) return;
  if (num_nodes > 1) network_ = measure_network(context, group);
  link_ = gpus_->measure_link();
  const int num_nvlinks = sensors_.num_nvlinks();
  if (!is_slow_link(*link_, num_nvlinks)) return;
  char text[200];
  std::snprintf(text, sizeof text,
                "INVALID: the link rate is %.0f GB/s, under the %.0f that %d NVLinks carry at least: something "
                "else uses them, or they are not well",
                link_->best(), kLeastFullLinkRate, num_nvlinks);
  note(text);
}

void Equipment::disconnect() {
  if (gpus_) gpus_->disconnect();
}

void Equipment::note(const std::string& sentence) {
  if (std::find(notes_.begin(), notes_.end(), sentence) == notes_.end()) notes_.push_back(sentence);
}

void Equipment::describe(Machine& machine) const {
  machine.gpu = sensors_.gpu();
  machine.driver = sensors_.driver();
  machine.clocks = sensors_.clocks();
  machine.link = link_;
  machine.network_gb_per_s = network_;
  if (const int num_nvlinks = sensors_.num_nvlinks()) machine.nvlinks = num_nvlinks;
  if (!unfused_) return;
  machine.nccl = unfused_->nccl_version();
  machine.cublaslt = unfused_->cublaslt_version();
}

}  // namespace perf
