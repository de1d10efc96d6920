// SPDX-License-Identifier: MIT
// One rank of AllGather+GEMM between nodes on an emulated GPU: its rows, and what its kernel is given of them.
// How CTAs part into roles, and what is made of rows that have come, says who derives from it.
#pragma once

#include "shim/device_words.h"

#include <vector>

#include "emulated_gpu.h"
#include "kernels/ops/allgather_gemm/cuda_network_kernel.cuh"

namespace mk::test {

struct Shape {
  int64_t m, columns;  // of the rows that travel
  int64_t chunk_rows = 32;
  int panel_steps = 1;
};

inline uint16_t element(uint64_t epoch, int64_t row, int64_t column) {
  return static_cast<uint16_t>(epoch * 40503 + static_cast<uint64_t>(row) * 331 +
                               static_cast<uint64_t>(column) * 7);
}

class GatherRank {
 public:
  explicit GatherRank(Rank& rank) : rank_(rank), gpu_(rank) {}

  Status set_up(int num_ctas, int64_t wait_timeout_ms = kPatienceMs) {
    constexpr size_t kBankBytes = 1 << 20;
    return gpu_.set_up(num_ctas, kBankBytes, wait_timeout_ms);
  }
  EmulatedGpu& gpu() { return gpu_; }

 protected:
  void describe(const Shape& shape, allgather_gemm::CudaParams* params) {
    params->comm = gpu_.comm();
    const RankComm& comm = params->comm;
    params->comm.entry.op = MK_OPERATOR_ALLGATHER_GEMM;
    params->comm.entry.output_offset = kNoOutput;
    params->comm.entry.shape[0] = shape.m;
    params->comm.entry.shape[1] = shape.columns;
    const int64_t max_rows = ceil_div(shape.m, comm.nranks);
    params->schedule.topology.nranks = comm.nranks;
    params->schedule.topology.rank = comm.rank;
    params->schedule.m = shape.m;
    params->schedule.k = shape.columns;
    params->schedule.chunk_rows = shape.chunk_rows;
    params->schedule.max_chunks = std::max(1, num_chunks(max_rows, shape.chunk_rows));
    params->m = static_cast<int>(shape.m);
    params->max_rows = static_cast<int>(std::max<int64_t>(1, max_rows));
    params->num_push_warps = comm.nranks == 2 ? NUM_PUSH_WARPS : 1;
    params->panel_steps = shape.panel_steps;
    params->num_panels =
        static_cast<int>(std::max<int64_t>(1, ceil_div(ceil_div(shape.columns, 64), shape.panel_steps)));
    params->a_pitch = round_up(shape.columns, 8) * 2;
    rows_.assign(static_cast<size_t>(max_rows * params->a_pitch / 2 + 8), 0xdead);
    params->a = reinterpret_cast<const std::byte*>(rows_.data());
  }

  void fill_rows(const allgather_gemm::CudaParams& params, uint64_t epoch) {
    for (int64_t row = 0; row < params.schedule.rows(rank_.rank); ++row) {
      for (int64_t column = 0; column < params.schedule.k; ++column) {
        rows_[static_cast<size_t>(row * params.a_pitch / 2 + column)] =
            element(epoch, int64_t{rank_.rank} * params.max_rows + row, column);
      }
    }
  }

  // The caller's gathered rows, if it wants them, as they are before a launch, and what is wrong with them
  // after.
  void make_gathered(bool is_wanted, allgather_gemm::CudaParams* params) {
    params->a_gathered_pitch = params->a_pitch;
    gathered_.assign(static_cast<size_t>(params->m * params->a_pitch / 2), kNotGathered);
    if (is_wanted && !gathered_.empty() && params->schedule.k > 0)
      params->a_gathered = reinterpret_cast<std::byte*>(gathered_.data());
  }
  void clear_gathered() { std::fill(gathered_.begin(), gathered_.end(), kNotGathered); }
  std::string wrong_gathered(const allgather_gemm::CudaParams& params, uint64_t epoch) const {
    for (int64_t i = 0; params.a_gathered != nullptr && i < static_cast<int64_t>(gathered_.size()); ++i) {
      const int64_t row = i / (params.a_gathered_pitch / 2), column = i % (params.a_gathered_pitch / 2);
      const uint16_t right = column < params.schedule.k ? element(epoch, row, column) : kNotGathered;
      if (gathered_[static_cast<size_t>(i)] != right)
        return format("launch %llu: gathered row %lld, column %lld is wrong; ", (unsigned long long)epoch,
                      (long long)row, (long long)column);
    }
    return "";
  }

  Rank& rank_;
  EmulatedGpu gpu_;

 private:
  static constexpr uint16_t kNotGathered = 0xbeef;

  std::vector<uint16_t> rows_;
  std::vector<uint16_t> gathered_;
};

}  // namespace mk::test
