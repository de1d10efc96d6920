// SPDX-License-Identifier: MIT
// What lies where in a bank of a launch on GPUs. Host and device.
#pragma once

#include "kernels/device/rank_comm.h"
#include "kernels/ops/moe_routing/cuda_params.h"
#include "kernels/ops/moe_routing/row_segments.h"

namespace mk::moe_gemm_combine {

// Of a bank's flags and of LaunchState's counts the first half is for what peers write, or are sent: blocks of
// rows that have come home. The second half is for blocks of rows that this rank has computed.
constexpr int64_t HALF_FLAGS = kFlagsPerBank / 2;

// Behind the counts: the rows of this rank's tokens that come home, in the order of their experts, then token;
// and the rows that this rank computes, in the order of its record.
struct CudaLayout {
  int64_t counts_bytes;
  int64_t row_bytes;

  MK_HOST_DEVICE int64_t home_row(int64_t index) const { return counts_bytes + index * row_bytes; }
  MK_HOST_DEVICE int64_t product_row(int64_t home_rows, int64_t index) const {
    return home_row(home_rows + index);
  }
  // Of a rank that computes `received` rows and whose tokens have `sent`; more than any bank has where the
  // flags do not suffice.
  MK_HOST_DEVICE int64_t bytes(int64_t received, int64_t sent) const {
    const int64_t most = received > sent ? received : sent;
    const int64_t blocks = most / moe::BLOCK_ROWS + 2 * moe::CUDA_MAX_EXPERTS + 2 * MAX_GPU_RANKS;
    return blocks < HALF_FLAGS ? counts_bytes + (received + sent) * row_bytes : INT64_MAX;
  }
};

}  // namespace mk::moe_gemm_combine
