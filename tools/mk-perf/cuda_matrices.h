// SPDX-License-Identifier: MIT
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "device.h"
#include "errors.h"

namespace perf {

extern const MatrixOperations kCudaMatrices;

inline void require_cuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  throw RunError(std::string(what) + ": " + cudaGetErrorName(error) + ": " + cudaGetErrorString(error));
}

}  // namespace perf
