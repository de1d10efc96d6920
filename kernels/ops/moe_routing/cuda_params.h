// SPDX-License-Identifier: MIT
// The routing of a mixture-of-experts operator on a GPU: what its kernel is given.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/device/host_device.h"
#include "kernels/gemm/gemm_plan.h"
#include "kernels/ops/moe_routing/record.h"
#include "kernels/ops/moe_routing/schedule.h"

namespace mk::moe {

// Experts over all ranks that a CTA has tables for.
constexpr int CUDA_MAX_EXPERTS = 512;
// CTAs that count a rank's rows, at most.
constexpr int MAX_COUNTING_CTAS = 32;

// The tiles that the kernels exist for: for many rows an expert, and for few.
constexpr GemmTile CUDA_TILES[] = {{128, 256, false}, {64, 128, false}};
constexpr int NUM_CUDA_TILES = sizeof(CUDA_TILES) / sizeof(CUDA_TILES[0]);
// Rows in a box of TMA: a low tile's expert has few rows as a rule.
MK_HOST_DEVICE constexpr int expert_box_rows(int block_m) { return block_m > 64 ? block_m : 16; }

struct CudaRouting {
  int rank;
  int nranks;
  int experts;
  int topk;
  int experts_per_rank;
  // A rank's block of counts, as Routing lays it out: its size, and places of numbers behind its head.
  int block_bytes;
  int rank_rows_at;
  int node_tokens_at;
  int received_at;
  int64_t tokens;
  const void* topk_idx;
  bool has_wide_indices;
  bool reads_record;  // in place of topk_idx
  bool writes_record;
  bool has_rows;  // a combine's
  bool combines;
  mk_moe_routing_t* record;
  size_t record_bytes;
  RecordItem* items;     // of the record
  int64_t row_capacity;  // rows that this rank can take
  int num_counting_ctas;

  MK_HOST_DEVICE int first_expert(int of_rank) const {
    const int first = of_rank * experts_per_rank;
    return first < experts ? first : experts;
  }
  MK_HOST_DEVICE int num_experts(int of_rank) const {
    return first_expert(of_rank + 1) - first_expert(of_rank);
  }
  MK_HOST_DEVICE int64_t num_items() const { return tokens * topk; }
  MK_HOST_DEVICE RecordLayout record_layout() const { return {num_experts(rank), topk, tokens}; }
};

// What peers have sent: a block of counts a rank.
class Counts {
 public:
  MK_HOST_DEVICE Counts(const CudaRouting& routing, const std::byte* blocks)
      : routing_(routing), blocks_(blocks) {}

  MK_HOST_DEVICE const CountsHead& head(int source) const {
    return *reinterpret_cast<const CountsHead*>(blocks_ + source * routing_.block_bytes);
  }
  MK_HOST_DEVICE uint32_t number(int source, int place) const {
    return reinterpret_cast<const uint32_t*>(blocks_ + source * routing_.block_bytes +
                                             sizeof(CountsHead))[place];
  }
  MK_HOST_DEVICE uint32_t expert_rows(int source, int expert) const { return number(source, expert); }
  MK_HOST_DEVICE uint32_t rank_rows(int source, int rank) const {
    return number(source, routing_.rank_rows_at + rank);
  }
  // Of several nodes alone.
  MK_HOST_DEVICE uint32_t node_tokens(int source, int node) const {
    return number(source, routing_.node_tokens_at + node);
  }
  MK_HOST_DEVICE uint32_t received(int rank, int local_expert) const {
    return number(rank, routing_.received_at + local_expert);
  }

 private:
  const CudaRouting& routing_;
  const std::byte* blocks_;
};

}  // namespace mk::moe
