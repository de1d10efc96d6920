// SPDX-License-Identifier: MIT
#include "nccl_library.h"

#include "errors.h"

namespace perf {

NcclLibrary::NcclLibrary(const std::string& path) : library_(path, {"libnccl.so.2", "libnccl.so"}) {
  library_.find("ncclGetUniqueId", get_unique_id);
  library_.find("ncclCommInitRank", comm_init_rank);
  library_.find("ncclAllGather", all_gather);
  library_.find("ncclReduceScatter", reduce_scatter);
  library_.find("ncclAllReduce", all_reduce);
  library_.find("ncclSend", send);
  library_.find("ncclRecv", receive);
  library_.find("ncclGroupStart", group_start);
  library_.find("ncclGroupEnd", group_end);
  library_.find("ncclGetVersion", get_version_);
  library_.find("ncclGetErrorString", get_error_string_);
  library_.find_optional("ncclGetLastError", get_last_error_);
}

std::string NcclLibrary::version() const {
  int version = 0;
  if (get_version_(&version) != ncclSuccess) return "unknown";
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

void NcclLibrary::require(ncclResult_t result, const char* what, ncclComm_t comm) const {
  if (result == ncclSuccess) return;
  const char* detail = get_last_error_ ? get_last_error_(comm) : nullptr;
  throw RunError(std::string(what) + ": " + get_error_string_(result) +
                 (detail && *detail ? std::string(": ") + detail : std::string()) +
                 "; NCCL_DEBUG=INFO says more, --baseline none leaves it out");
}

ncclDataType_t nccl_type(mk_dtype_t dtype) {
  switch (dtype) {
    case MK_DTYPE_FP32:
      return ncclFloat32;
    case MK_DTYPE_FP16:
      return ncclFloat16;
    default:
      return ncclBfloat16;
  }
}

}  // namespace perf
