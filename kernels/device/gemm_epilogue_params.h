// SPDX-License-Identifier: MIT
#pragma once

#include <cstdint>

#include "kernels/device/host_device.h"
#include "kernels/gemm/gemm_plan.h"

namespace mk {

MK_HOST_DEVICE int element_bytes_of(GemmType type) { return type == GemmType::fp32 ? 4 : 2; }

// What the epilogue needs beside the accumulators. Columns from n on are not written; rows are bounded by each
// call.
struct EpilogueParams {
  void* c;
  int64_t ldc;  // elements
  const void* bias;
  int n;
  GemmType out_type;
  GemmType bias_type;
  bool accumulate;
  bool rows_aligned;  // 16-byte aligned rows
};

}  // namespace mk
