// SPDX-License-Identifier: MIT
// What lies where in a bank of a launch on GPUs. Host and device.
#pragma once

#include "kernels/protocol.h"

namespace mk::moe_dispatch_gemm {

// What travels beside a row.
struct RowOrigin {
  int32_t token;
  int16_t rank;
  int16_t k;
  float factor;
  int32_t reserved;
};
static_assert(sizeof(RowOrigin) == 16);

// Behind the counts: the rows that a rank gets, in the order of its record; where each comes from; and the
// (token, k) of the rows that this rank sends, in the order of their experts.
struct CudaLayout {
  int64_t counts_bytes;
  int64_t capacity_rows;
  int64_t row_bytes;
  int64_t sent_rows;  // at most

  MK_HOST_DEVICE int64_t rows() const { return counts_bytes; }
  MK_HOST_DEVICE int64_t row(int64_t index) const { return rows() + index * row_bytes; }
  MK_HOST_DEVICE int64_t origin(int64_t index) const {
    return row(capacity_rows) + index * static_cast<int64_t>(sizeof(RowOrigin));
  }
  MK_HOST_DEVICE int64_t order() const { return origin(capacity_rows); }
  MK_HOST_DEVICE int64_t bytes() const { return order() + sent_rows * 4; }
};

}  // namespace mk::moe_dispatch_gemm
