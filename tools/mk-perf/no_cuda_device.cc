// SPDX-License-Identifier: MIT
// Stands in for all that needs the CUDA run time in builds without it.
#include "device.h"
#include "gpu_ranks.h"

namespace perf {

const DeviceOperations* cuda_device() { return nullptr; }

int num_gpus() { return 0; }

std::unique_ptr<GpuRanks> connect_gpus(const Context&, RankGroup&, std::string&) { return nullptr; }

}  // namespace perf
