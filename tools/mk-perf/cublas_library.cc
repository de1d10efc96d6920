// SPDX-License-Identifier: MIT
#include "cublas_library.h"

namespace perf {
namespace {

std::string beside(std::string cublaslt_path) {
  const size_t name = cublaslt_path.rfind("libcublasLt");
  return name == std::string::npos ? std::string() : cublaslt_path.replace(name, 11, "libcublas");
}

}  // namespace

CublasLibrary::CublasLibrary(const std::string& cublaslt_path, cudaStream_t stream, void* workspace,
                             size_t workspace_bytes)
    : library_(beside(cublaslt_path), {"libcublas.so.13", "libcublas.so.12", "libcublas.so"}) {
  library_.find("cublasGemmGroupedBatchedEx", gemm_grouped_batched_ex);
  library_.find("cublasCreate_v2", create_);
  library_.find("cublasDestroy_v2", destroy_);
  library_.find("cublasSetStream_v2", set_stream_);
  library_.find("cublasSetWorkspace_v2", set_workspace_);
  library_.find("cublasGetVersion_v2", get_version_);
  require(create_(&handle_), "cublasCreate");
  // In this order: a new stream brings back cuBLAS's own workspace, which a captured product must not use.
  require(set_stream_(handle_, stream), "cublasSetStream");
  require(set_workspace_(handle_, workspace, workspace_bytes), "cublasSetWorkspace");
}

CublasLibrary::~CublasLibrary() { destroy_(handle_); }

std::string CublasLibrary::version() const {
  int version = 0;
  if (get_version_(handle_, &version) != CUBLAS_STATUS_SUCCESS) return "unknown";
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

void CublasLibrary::require(cublasStatus_t status, const char* what) const {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  if (handle_) destroy_(handle_);
  throw LibraryAbsent{library_.name() + ": " + what + ": cuBLAS status " +
                      std::to_string(static_cast<int>(status))};
}

}  // namespace perf
