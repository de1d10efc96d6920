// SPDX-License-Identifier: MIT
// MoE dispatch + GEMM: where rows belong, worked out on the device from the counts of all ranks; and the
// routing record.
#pragma once

#include "kernels/ops/moe_dispatch_gemm/cuda_params.h"
#include "kernels/ops/moe_dispatch_gemm/push_units.h"
#include "kernels/ops/moe_routing/cuda_routing.cuh"

namespace mk::moe_dispatch_gemm {

// By all threads of a CTA.
template <int NUM_THREADS>
__device__ void fill_tables(const RankLaunch& launch, const CudaParams& params, Tables& tables) {
  const moe::CudaRouting& routing = params.routing;
  const moe::Counts counts(routing, launch.area(routing.rank, 0));
  for (int expert = threadIdx.x; expert < routing.experts; expert += NUM_THREADS)
    count_expert(routing, counts, params.unit_rows, expert, tables);
  __syncthreads();
  uint32_t* const sums[] = {tables.rows, tables.blocks, tables.own_rows, tables.units};
  for (int i = threadIdx.x / 32; i < 4; i += NUM_THREADS / 32) moe::exclusive_scan(sums[i], routing.experts);
  __syncthreads();
}

// A counting CTA, all threads: what each (token, k) is among this rank's rows for its expert, into the record
// and into the order in which rows are pushed. The warps go through the items that they have counted.
template <int NUM_THREADS>
__device__ void place_items(const RankLaunch& launch, const CudaParams& params, const Tables& tables,
                            moe::CountingStorage<NUM_THREADS>& smem, bool goes_on) {
  const moe::CudaRouting& routing = params.routing;
  const moe::WarpItems<NUM_THREADS> items(routing);
  if (!goes_on) {
    if (!routing.writes_record) return;
    for (int64_t item = items.begin + threadIdx.x % 32; item < items.end; item += 32)
      routing.items[item] = {-1, 0};
    return;
  }
  for (int expert = threadIdx.x; expert < routing.experts; expert += NUM_THREADS) {
    uint32_t rows = 0;
#pragma unroll 8
    for (int cta = 0; cta < static_cast<int>(blockIdx.x); ++cta)
      rows += __ldcg(moe::cta_rows(params.comm, routing, cta) + expert);
    for (auto& taken : smem.taken) {
      const uint32_t more = taken[expert];
      taken[expert] = rows;
      rows += more;
    }
  }
  __syncthreads();
  auto* order = reinterpret_cast<uint32_t*>(launch.area(routing.rank, params.layout.order()));
  moe::number_items(routing, launch.progress(), smem.taken[threadIdx.x / 32], items.begin, items.end,
                    [&](int64_t item, int expert, uint32_t number) {
                      if (expert >= 0) order[tables.own_rows[expert] + number] = static_cast<uint32_t>(item);
                      if (routing.writes_record)
                        routing.items[item] = {expert, expert >= 0 ? static_cast<int32_t>(number) : 0};
                    });
}

// All of the record but items and rows; one CTA, all threads.
template <int NUM_THREADS>
__device__ void begin_record(const CudaParams& params, const Tables& tables, const moe::Verdict& verdict) {
  const moe::CudaRouting& routing = params.routing;
  const moe::RecordLayout layout = routing.record_layout();
  const moe::RecordView record{routing.record};
  const int first = routing.first_expert(routing.rank);
  const bool goes_on = verdict.kind == moe::Verdict::go;
  const auto rows_before = [&](int local) -> int32_t {
    return goes_on ? static_cast<int32_t>(tables.rows[first + local] - tables.rows[first]) : 0;
  };
  auto* expert_counts = record.at<int32_t>(layout.counts_offset());
  auto* expert_offsets = record.at<int32_t>(layout.offsets_offset());
  for (int local = threadIdx.x; local <= layout.local_experts; local += NUM_THREADS) {
    expert_offsets[local] = rows_before(local);
    if (local < layout.local_experts) expert_counts[local] = rows_before(local + 1) - rows_before(local);
  }
  if (threadIdx.x != 0) return;
  const int64_t rows = rows_before(layout.local_experts);
  const int64_t needed = goes_on ? rows : verdict.kind == moe::Verdict::capacity ? verdict.needed : 0;
  *routing.record = {moe::kRecordMagic,
                     moe::kRecordVersion,
                     goes_on ? MK_SUCCESS : MK_ERROR_DATA,
                     layout.local_experts,
                     routing.tokens,
                     rows,
                     needed,
                     layout.counts_offset(),
                     layout.offsets_offset(),
                     layout.rows_offset()};
  *record.at<moe::RecordHead>(moe::RecordLayout::kHead) = {
      routing.nranks, routing.rank, routing.experts, routing.topk, layout.items_offset(), 0};
}

}  // namespace mk::moe_dispatch_gemm
