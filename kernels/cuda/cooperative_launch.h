// SPDX-License-Identifier: MIT
#pragma once

#include <cuda_runtime.h>

namespace mk {

// Either all CTAs become resident, or none holds an SM while it waits for a peer.
template <class Params>
cudaError_t launch_cooperatively(void (*kernel)(Params), const Params& params, int num_ctas, int num_threads,
                                 int smem_bytes, cudaStream_t stream) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeCooperative;
  attribute.val.cooperative = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(num_ctas);
  config.blockDim = dim3(num_threads);
  config.dynamicSmemBytes = smem_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, params);
}

}  // namespace mk
