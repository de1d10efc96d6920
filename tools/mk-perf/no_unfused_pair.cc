// SPDX-License-Identifier: MIT
// Stands in for cuda_unfused_pair.cc in builds without CUDA, nccl.h or cublasLt.h.
#include "unfused_pair.h"

namespace perf {

std::unique_ptr<UnfusedLibraries> load_unfused_libraries(const Context&, RankGroup&, const UnfusedPaths&,
                                                         std::string& problem) {
  problem = "this mk-perf was built where CUDA, nccl.h or cublasLt.h was missing";
  return nullptr;
}

}  // namespace perf
