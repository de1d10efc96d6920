// SPDX-License-Identifier: MIT
#pragma once

#include <optional>
#include <string>

#include "mkernel.h"
#include "roofline.h"

namespace perf {

// What a result was measured on; what does not apply or cannot be read is absent.
struct Machine {
  std::optional<std::string> cpu;
  int cores = 0;
  std::string kernel;
  std::optional<std::string> gpu;
  std::optional<std::string> driver;
  std::optional<std::string> clocks;  // the limits
  std::optional<int> nvlinks;         // of one GPU
  std::optional<LinkRate> link;
  std::optional<double> network_gb_per_s;  // of a rank, all sending
  std::optional<std::string> nccl;         // version of the baseline's
  std::optional<std::string> cublaslt;
  std::string build;  // version and commit that mk-perf was built from
  std::string compiler;
};

// What the operating system knows; the driver's libraries may know more of the GPU.
Machine describe_machine(mk_device_t device);
// Adds what `found` has.
void complete(Machine& machine, const Machine& found);

// "0.1.0", of the library that is loaded.
std::string library_version();
std::string build_id();

}  // namespace perf
