// SPDX-License-Identifier: MIT
// The CUDA driver, loaded at run time: the library itself needs neither driver nor GPU. Needs no CUDA header;
// files that call the driver include cuda_driver_table.h.
#pragma once

#include <string>

#include "status.h"

namespace mk::cuda {

struct Driver;

// The driver's table, loaded and initialised on the first call; valid for the life of the process.
// MK_ERROR_UNSUPPORTED says what is missing: the library was built without CUDA, there is no libcuda.so.1, it
// is too old, or it refuses to start.
Result<const Driver*> load();

Result<int> device_count();

// For sentences: "CUDA device 1 (NVIDIA H200, 0000:3b:00.0)"; without name and bus id when the driver does not
// know it.
std::string describe_device(int device);

// As sysfs spells it: "0000:3b:00.0"; "" when the driver does not know the device.
std::string pci_bus_id(int device);

}  // namespace mk::cuda
