// SPDX-License-Identifier: MIT
// Stands in for cuda_device.cc in builds without CUDA.
#include "device.h"

namespace perf {

const DeviceOperations* cuda_device() { return nullptr; }

}  // namespace perf
