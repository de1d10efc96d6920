// SPDX-License-Identifier: MIT
// The memory of a GPU rank's trace, and its way to the host.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>

#include "kernels/cuda/clock_exchange.h"
#include "kernels/cuda/cuda_error.h"
#include "kernels/device/trace_buffer.h"
#include "kernels/trace.h"
#include "lib/status.h"

namespace mk {

// One trace, from start to stop. Works on a stream of its own and lets other streams be, captures included; its
// device is current in every call.
class CudaTrace {
 public:
  // Records up to `max_spans` spans a track, of launches of up to `num_ctas` CTAs.
  static Result<std::unique_ptr<CudaTrace>> make(int num_ctas, int64_t max_spans);
  ~CudaTrace();
  CudaTrace(const CudaTrace&) = delete;
  CudaTrace& operator=(const CudaTrace&) = delete;

  // What launches of at most num_ctas CTAs are given.
  TraceBuffer* buffer() const { return reinterpret_cast<TraceBuffer*>(memory_); }
  // What was recorded so far. No launch is running.
  Result<Trace> collect();
  // A captured launch has the buffer and will come again, after the end of the trace, too: until its rows are
  // full it goes on to record what nobody reads.
  void keep() { stays_ = true; }
  bool stays() const { return stays_; }

 private:
  CudaTrace(int num_ctas, int64_t max_spans)
      : layout_{static_cast<uint32_t>(num_ctas), static_cast<uint32_t>(max_spans)} {}
  Status allocate();
  // From the device's time to the steady clock's.
  int64_t clock_offset_ns();

  const TraceLayout layout_;
  cudaStream_t stream_ = nullptr;
  std::byte* memory_ = nullptr;
  ClockExchange* exchange_ = nullptr;
  bool stays_ = false;
};

}  // namespace mk
