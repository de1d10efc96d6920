// SPDX-License-Identifier: MIT
// Traces of a GPU rank's launches.
#include <chrono>
#include <thread>

#include "kernels/cuda/cuda_error.h"
#include "kernels/cuda/cuda_executor.h"

namespace mk {

Status CudaExecutor::start_trace(int64_t max_spans) {
  constexpr int64_t kDefaultSpans = 2048;
  const CurrentDevice current(device_);
  MK_RETURN_IF_ERROR(current.status());
  Result<std::unique_ptr<CudaTrace>> trace =
      CudaTrace::make(num_sms_, max_spans > 0 ? max_spans : kDefaultSpans);
  if (!trace.ok()) return trace.status();
  trace_ = trace.take();
  return {};
}

Result<Trace> CudaExecutor::collect_trace() {
  const CurrentDevice current(device_);
  MK_RETURN_IF_ERROR(current.status());
  {
    const BesideCaptures beside;
    cudaError_t state = query_launches();
    for (; state == cudaErrorNotReady; state = query_launches())
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    MK_RETURN_IF_ERROR(cuda_error(state, "waiting for the launches"));
  }
  return trace_->collect();
}

void CudaExecutor::stop_trace() {
  const CurrentDevice current(device_);
  if (trace_->stays()) ended_traces_.push_back(std::move(trace_));
  trace_.reset();
}

}  // namespace mk
