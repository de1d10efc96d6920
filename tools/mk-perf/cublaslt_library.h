// SPDX-License-Identifier: MIT
// cublasLt, loaded at run time, and a product by it.
#pragma once

#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include <string>
#include <vector>

#include "dynamic_library.h"
#include "operators.h"

namespace perf {

cudaDataType_t cuda_type(mk_dtype_t dtype);

class CublasLtLibrary {
 public:
  // Throws LibraryAbsent; a RunError when the library does not work here.
  explicit CublasLtLibrary(const std::string& path);
  ~CublasLtLibrary();
  CublasLtLibrary(const CublasLtLibrary&) = delete;
  CublasLtLibrary& operator=(const CublasLtLibrary&) = delete;

  std::string version() const;
  void require(cublasStatus_t status, const char* what) const;

  cublasLtHandle_t handle() const { return handle_; }
  void* workspace() const { return workspace_; }
  static constexpr size_t kWorkspaceBytes = size_t{64} << 20;

  decltype(&cublasLtMatmul) matmul = nullptr;
  decltype(&cublasLtMatmulAlgoGetHeuristic) algo_get_heuristic = nullptr;
  decltype(&cublasLtMatmulDescCreate) desc_create = nullptr;
  decltype(&cublasLtMatmulDescDestroy) desc_destroy = nullptr;
  decltype(&cublasLtMatmulDescSetAttribute) desc_set_attribute = nullptr;
  decltype(&cublasLtMatrixLayoutCreate) layout_create = nullptr;
  decltype(&cublasLtMatrixLayoutDestroy) layout_destroy = nullptr;
  decltype(&cublasLtMatmulPreferenceCreate) preference_create = nullptr;
  decltype(&cublasLtMatmulPreferenceDestroy) preference_destroy = nullptr;
  decltype(&cublasLtMatmulPreferenceSetAttribute) preference_set_attribute = nullptr;

 private:
  DynamicLibrary library_;
  decltype(&cublasLtCreate) create_ = nullptr;
  decltype(&cublasLtDestroy) destroy_ = nullptr;
  decltype(&cublasLtGetVersion) get_version_ = nullptr;
  decltype(&cublasLtGetStatusName) get_status_name_ = nullptr;
  cublasLtHandle_t handle_ = nullptr;
  void* workspace_ = nullptr;
};

// C[m, n] = A[m, k] * B as row-major matrices in the layouts of an UnfusedShape, into C of `c_dtype`; of mode
// WGRAD C[k, n] = dY[m, k]^T * X[m, n], where X is `a` and dY is `b`.
class CublasLtProduct {
 public:
  CublasLtProduct(const CublasLtLibrary& library, const UnfusedShape& shape, mk_dtype_t c_dtype);
  ~CublasLtProduct();
  CublasLtProduct(const CublasLtProduct&) = delete;
  CublasLtProduct& operator=(const CublasLtProduct&) = delete;

  // Of the heuristic, its favourite first; at least one.
  int num_proposals() const { return static_cast<int>(proposals_.size()); }
  cublasStatus_t try_launch(int proposal, const void* a, const void* b, void* c, cudaStream_t stream) const;
  void choose(int proposal) { chosen_ = proposal; }
  void launch(const void* a, const void* b, void* c, cudaStream_t stream) const;

 private:
  void destroy();

  const CublasLtLibrary& library_;
  cublasLtMatmulDesc_t product_ = nullptr;
  const bool is_wgrad_;
  const bool accumulates_;
  cublasLtMatrixLayout_t first_ = nullptr;
  cublasLtMatrixLayout_t second_ = nullptr;
  cublasLtMatrixLayout_t c_ = nullptr;
  std::vector<cublasLtMatmulHeuristicResult_t> proposals_;
  int chosen_ = 0;
};

}  // namespace perf
