// SPDX-License-Identifier: MIT
#pragma once

#include <cuda_runtime.h>

namespace mk {

template <class Params>
cudaError_t launch_with_attribute(void (*kernel)(Params), const Params& params, int num_ctas, int num_threads,
                                  int smem_bytes, cudaStream_t stream, cudaLaunchAttribute attribute) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(num_ctas);
  config.blockDim = dim3(num_threads);
  config.dynamicSmemBytes = smem_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, params);
}

// Either all CTAs become resident, or none holds an SM while it waits for a peer.
template <class Params>
cudaError_t launch_cooperatively(void (*kernel)(Params), const Params& params, int num_ctas, int num_threads,
                                 int smem_bytes, cudaStream_t stream) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeCooperative;
  attribute.val.cooperative = 1;
  return launch_with_attribute(kernel, params, num_ctas, num_threads, smem_bytes, stream, attribute);
}

// Of one rank, whose CTAs wait for none but those that came before them: they may come while the stream's
// kernel before is at its end, and wait for it themselves (docs/decisions/019-the-next-grid-comes-early.md).
template <class Params>
cudaError_t launch_early(void (*kernel)(Params), const Params& params, int num_ctas, int num_threads,
                         int smem_bytes, cudaStream_t stream) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  return launch_with_attribute(kernel, params, num_ctas, num_threads, smem_bytes, stream, attribute);
}

}  // namespace mk
