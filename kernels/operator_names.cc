// SPDX-License-Identifier: MIT
#include "operator_names.h"

namespace mk {

const char* operator_name(mk_operator_t op) {
  switch (op) {
    case MK_OPERATOR_NONE:
      return "none";
    case MK_OPERATOR_ALLGATHER_GEMM:
      return "allgather_gemm";
    case MK_OPERATOR_GEMM_REDUCE_SCATTER:
      return "gemm_reduce_scatter";
    case MK_OPERATOR_GEMM_ALLREDUCE:
      return "gemm_allreduce";
    case MK_OPERATOR_MOE_DISPATCH_GEMM:
      return "moe_dispatch_gemm";
    case MK_OPERATOR_MOE_GEMM_COMBINE:
      return "moe_gemm_combine";
    case MK_OPERATOR_RING_ATTENTION:
      return "ring_attention";
    case MK_OPERATOR_RING_ATTENTION_BACKWARD:
      return "ring_attention_backward";
  }
  return "unknown operator";
}

const char* dtype_name(mk_dtype_t dtype) {
  switch (dtype) {
    case MK_DTYPE_DEFAULT:
      return "default";
    case MK_DTYPE_BF16:
      return "bf16";
    case MK_DTYPE_FP16:
      return "fp16";
    case MK_DTYPE_FP32:
      return "fp32";
    case MK_DTYPE_FP8_E4M3:
      return "fp8_e4m3";
    case MK_DTYPE_FP8_E5M2:
      return "fp8_e5m2";
  }
  return "unknown dtype";
}

}  // namespace mk
