// SPDX-License-Identifier: MIT
// Stands in for cuda_unfused_libraries.cc in builds without CUDA or the headers of NCCL and cuBLAS.
#include "unfused_pair.h"

namespace perf {

std::unique_ptr<UnfusedLibraries> load_unfused_libraries(const Context&, RankGroup&, const UnfusedPaths&,
                                                         std::string& problem) {
  problem = "this mk-perf was built where CUDA, nccl.h, cublasLt.h or cublas_v2.h was missing";
  return nullptr;
}

}  // namespace perf
