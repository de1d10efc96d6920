// SPDX-License-Identifier: MIT
#pragma once

#include "kernels/gemm/gemm_plan.h"
#include "mkernel.h"

namespace mk {

constexpr GemmType gemm_type(mk_dtype_t dtype) {
  return dtype == MK_DTYPE_FP32 ? GemmType::fp32 : dtype == MK_DTYPE_FP16 ? GemmType::fp16 : GemmType::bf16;
}

}  // namespace mk
