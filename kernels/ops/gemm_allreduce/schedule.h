// SPDX-License-Identifier: MIT
// GEMM+AllReduce, two-shot: the reduce-scatter's schedule, then each owner's finished rows travel like the
// all-gather's chunks. The two halves share a bank: their regions, flags and signals are laid one behind the
// other.
#pragma once

#include "../allgather_gemm/schedule.h"
#include "../gemm_reduce_scatter/schedule.h"

namespace mk::gemm_allreduce {

struct Schedule {
  gemm_reduce_scatter::Schedule reduce;
  allgather_gemm::Schedule gather;  // its k counts 16-bit units a row of the output: n, or 2n for fp32

  // Both halves cut a rank's rows into the same chunks: a chunk is sent on as soon as it is reduced.
  MK_HOST_DEVICE size_t gather_begin() const {
    return static_cast<size_t>(round_up(static_cast<int64_t>(reduce.area_bytes()), 128));
  }
  MK_HOST_DEVICE size_t gather_offset(int owner, int chunk) const {
    return gather_begin() + gather.area_offset(owner, chunk);
  }
  MK_HOST_DEVICE size_t area_bytes() const { return gather_begin() + gather.area_bytes(); }

  MK_HOST_DEVICE int gather_flag(int owner, int chunk) const {
    return reduce.num_flags() + gather.flag(owner, chunk);
  }
  MK_HOST_DEVICE int gather_signal(int owner, int chunk) const {
    return reduce.num_signals() + gather.signal(owner, chunk);
  }
};

}  // namespace mk::gemm_allreduce
