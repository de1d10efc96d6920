// SPDX-License-Identifier: MIT
// The plain matrix product: C[m, n] = A B (+ C) (+ bias), one persistent kernel. What an operator runs when its
// world size is 1, and the yardstick for its tensor-core half.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/gemm/gemm_plan.h"

namespace mk {

struct TraceBuffer;

// Where a launch records its spans, and as what.
struct GemmTrace {
  TraceBuffer* buffer = nullptr;  // for as many CTAs as the plan has, or null: nothing is recorded
  uint64_t epoch = 0;
  uint32_t op = 0;
  int64_t shape[4] = {};
};

// Row-major throughout, leading dimensions in elements. a, b: 16-byte aligned, lda and ldb multiples of 8. c:
// any alignment of its element; rows that are not 16-byte aligned are stored element by element, which is
// slower.
struct GemmArguments {
  GemmShape shape;
  const void* a = nullptr;
  int64_t lda = 0;
  const void* b = nullptr;
  int64_t ldb = 0;
  void* c = nullptr;
  int64_t ldc = 0;
  const void* bias = nullptr;  // [n], added to every row before the rounding; may be null
  GemmType bias_type = GemmType::fp32;
  // plan.workspace_bytes, 16-byte aligned. Zeroed once by the caller; every launch leaves it ready for the
  // next. Launches that may overlap need one each.
  void* workspace = nullptr;
  int num_sms = 0;  // of the device; 0: not known, and only short products let the next one's CTAs come early
  GemmTrace trace;
};

// Loads the kernels on the current device and sets their attributes; may synchronise. Once a device, before the
// first launch. cudaErrorNoKernelImageForDevice where the device is not sm_90.
cudaError_t gemm_prepare();

// Of the current device. May take a while: loads a kernel.
cudaError_t gemm_cluster_limits(GemmClusterLimits* limits);

// Enqueues exactly one kernel (none if m or n is 0); allocates nothing, waits for nothing, may be captured.
// cudaErrorInvalidValue: misaligned or out-of-range argument; cudaErrorNotReady: gemm_prepare was not called.
cudaError_t gemm_launch(const GemmArguments& arguments, const GemmPlan& plan, cudaStream_t stream);

}  // namespace mk
