// SPDX-License-Identifier: MIT
// NCCL, loaded at run time, and a communicator of it.
#pragma once

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <string>

#include "dynamic_library.h"
#include "operators.h"

namespace perf {

class NcclLibrary {
 public:
  // Throws LibraryAbsent.
  explicit NcclLibrary(const std::string& path);

  std::string version() const;
  // A RunError with NCCL's own words.
  void require(ncclResult_t result, const char* what, ncclComm_t comm = nullptr) const;

  decltype(&ncclGetUniqueId) get_unique_id = nullptr;
  decltype(&ncclCommInitRank) comm_init_rank = nullptr;
  decltype(&ncclAllGather) all_gather = nullptr;
  decltype(&ncclReduceScatter) reduce_scatter = nullptr;
  decltype(&ncclAllReduce) all_reduce = nullptr;
  decltype(&ncclSend) send = nullptr;
  decltype(&ncclRecv) receive = nullptr;
  decltype(&ncclGroupStart) group_start = nullptr;
  decltype(&ncclGroupEnd) group_end = nullptr;

 private:
  DynamicLibrary library_;
  decltype(&ncclGetVersion) get_version_ = nullptr;
  decltype(&ncclGetErrorString) get_error_string_ = nullptr;
  decltype(&ncclGetLastError) get_last_error_ = nullptr;
};

ncclDataType_t nccl_type(mk_dtype_t dtype);

}  // namespace perf
