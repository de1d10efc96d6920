// SPDX-License-Identifier: MIT
// Stands in for the CUDA executor in builds without it.
#include "executor.h"

namespace mk {

std::string cuda_device_identity(int) { return {}; }

Result<GpuNetworkTraits> cuda_network_traits(int) {
  return Status(MK_ERROR_UNSUPPORTED, "this libmkernel was built without CUDA");
}

Result<std::unique_ptr<Executor>> make_cuda_executor(ExecutorContext, Deadline) {
  return Status(
      MK_ERROR_UNSUPPORTED,
      "device = MK_DEVICE_CUDA: this libmkernel has no CUDA executor; use MK_DEVICE_HOST or MK_DEVICE_AUTO");
}

}  // namespace mk
