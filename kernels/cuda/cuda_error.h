// SPDX-License-Identifier: MIT
#pragma once

#include <cuda_runtime_api.h>

#include "lib/status.h"

namespace mk {

// MK_SUCCESS for cudaSuccess.
inline Status cuda_error(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return {};
  const char* name = cudaGetErrorName(error);
  const char* words = cudaGetErrorString(error);
  if (error == cudaErrorMemoryAllocation)
    return Status(MK_ERROR_OUT_OF_MEMORY, format("%s: %s: %s", what, name, words));
  return Status(MK_ERROR_CUDA, format("%s: %s: %s", what, name, words));
}

// Makes a device current and puts the caller's back.
class CurrentDevice {
 public:
  explicit CurrentDevice(int device) {
    error_ = cudaGetDevice(&before_);
    if (error_ == cudaSuccess && before_ != device) {
      error_ = cudaSetDevice(device);
      changed_ = error_ == cudaSuccess;
    }
  }
  ~CurrentDevice() {
    if (changed_) cudaSetDevice(before_);
  }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;
  Status status() const { return cuda_error(error_, "making the device current"); }

 private:
  int before_ = 0;
  bool changed_ = false;
  cudaError_t error_;
};

// While this lives, what its thread does on other streams does not offend against captures under way.
class BesideCaptures {
 public:
  BesideCaptures() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~BesideCaptures() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  BesideCaptures(const BesideCaptures&) = delete;
  BesideCaptures& operator=(const BesideCaptures&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

}  // namespace mk
