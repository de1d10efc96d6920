// SPDX-License-Identifier: MIT
// cuBLAS proper, loaded at run time for its grouped product.
#pragma once

#include <cublas_v2.h>
#include <cuda_runtime_api.h>

#include <string>

#include "dynamic_library.h"

namespace perf {

class CublasLibrary {
 public:
  // Beside the cublasLt of `cublaslt_path`, or where the loader finds it. Its products go to `stream` and share
  // `workspace` with what else does. Throws LibraryAbsent.
  CublasLibrary(const std::string& cublaslt_path, cudaStream_t stream, void* workspace, size_t workspace_bytes);
  ~CublasLibrary();
  CublasLibrary(const CublasLibrary&) = delete;
  CublasLibrary& operator=(const CublasLibrary&) = delete;

  std::string version() const;
  cublasHandle_t handle() const { return handle_; }

  decltype(&cublasGemmGroupedBatchedEx) gemm_grouped_batched_ex = nullptr;

 private:
  void require(cublasStatus_t status, const char* what) const;

  DynamicLibrary library_;
  decltype(&cublasCreate_v2) create_ = nullptr;
  decltype(&cublasDestroy_v2) destroy_ = nullptr;
  decltype(&cublasSetStream_v2) set_stream_ = nullptr;
  decltype(&cublasSetWorkspace_v2) set_workspace_ = nullptr;
  decltype(&cublasGetVersion_v2) get_version_ = nullptr;
  cublasHandle_t handle_ = nullptr;
};

}  // namespace perf
