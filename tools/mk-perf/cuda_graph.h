// SPDX-License-Identifier: MIT
#pragma once

#include <cuda_runtime_api.h>

#include <functional>

#include "cuda_matrices.h"

namespace perf {

// What `enqueue` puts on the stream, captured to be replayed.
class CudaGraph {
 public:
  CudaGraph(cudaStream_t stream, const std::function<void()>& enqueue) {
    cudaGraph_t graph = nullptr;
    require_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
    try {
      enqueue();
    } catch (...) {
      cudaStreamEndCapture(stream, &graph);
      if (graph) cudaGraphDestroy(graph);
      throw;
    }
    require_cuda(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
    const cudaError_t error = cudaGraphInstantiate(&executable_, graph, 0);
    cudaGraphDestroy(graph);
    require_cuda(error, "cudaGraphInstantiate");
  }
  ~CudaGraph() {
    if (executable_) cudaGraphExecDestroy(executable_);
  }
  CudaGraph(CudaGraph&& other) noexcept : executable_(other.executable_) { other.executable_ = nullptr; }
  CudaGraph& operator=(CudaGraph&&) = delete;

  void launch(cudaStream_t stream) const {
    require_cuda(cudaGraphLaunch(executable_, stream), "cudaGraphLaunch");
  }

 private:
  cudaGraphExec_t executable_ = nullptr;
};

}  // namespace perf
