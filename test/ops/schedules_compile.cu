// SPDX-License-Identifier: MIT
// Every function of the schedules compiles for the device. Compiled, never run.
#include "kernels/ops/allgather_gemm/schedule.h"
#include "kernels/ops/gemm_allreduce/schedule.h"
#include "kernels/ops/gemm_reduce_scatter/schedule.h"
#include "kernels/ops/ring_attention/schedule.h"
#include "kernels/ops/ring_attention_backward/schedule.h"

namespace {

__device__ int64_t use(const mk::TopologyView& view) {
  return view.node() + view.local_rank() + view.local_nranks() + view.node_nranks(0) + view.rank_at(0, 0) +
         view.is_local(0) + view.rail_peer(0, 0) + view.rotated(0);
}

__device__ int64_t use(const mk::ControlLayout& layout) {
  return static_cast<int64_t>(layout.entry(0, 0) + layout.inbox(0, 0) + layout.outbox(0) + layout.flag(0, 0) +
                              layout.bytes() + mk::ControlLayout::kDoorbell + mk::ControlLayout::kSleepers);
}

__device__ int64_t use(const mk::allgather_gemm::Schedule& schedule) {
  const auto sizes =
      schedule.row_bytes() + schedule.row_pitch() + schedule.area_bytes() + schedule.area_offset(0, 0);
  return static_cast<int64_t>(sizes) + schedule.rows(0) + schedule.chunks(0) + schedule.chunk_begin(0, 0) +
         schedule.chunk_count(0, 0) + schedule.flag(0, 0) + schedule.signal(0, 0) + schedule.writer(0, 0) +
         schedule.relays(0) + schedule.source_at(0) + schedule.tile_rows(0) + schedule.tile_first_chunk(0) +
         schedule.tile_last_chunk(0, 0);
}

__device__ int64_t use(const mk::gemm_reduce_scatter::Schedule& schedule) {
  const auto sizes = schedule.row_bytes() + schedule.row_pitch() + schedule.slot_bytes() +
                     schedule.partial_offset(0, 0, 0, 0) + schedule.send_offset(0, 0, 0) +
                     schedule.sums_begin() + schedule.sum_offset(0, 0) + schedule.area_bytes();
  return static_cast<int64_t>(sizes) + schedule.rows(0) + schedule.max_rows() + schedule.chunks(0) +
         schedule.chunk_count(0, 0) + schedule.reducer(0, 0) + schedule.owners_per_node(0) +
         schedule.reduction(0, 0) + schedule.reductions(0) + schedule.flag(0, 0, 0) + schedule.num_flags() +
         schedule.signal(0, 0) + schedule.num_signals() + schedule.owner_at(0) + schedule.tile_rows(0);
}

__device__ int64_t use(const mk::gemm_allreduce::Schedule& schedule) {
  const auto sizes = schedule.gather_begin() + schedule.gather_offset(0, 0) + schedule.area_bytes();
  return static_cast<int64_t>(sizes) + schedule.gather_flag(0, 0) + schedule.gather_signal(0, 0) +
         use(schedule.reduce) + use(schedule.gather);
}

__device__ int64_t use(const mk::ring_attention::Slices& slices) {
  return slices.sequences() + slices.sequence_begin(0) + slices.sequence_at(0) + slices.visible_begin(0) +
         slices.visible_end(0) + slices.runs() + slices.run_begin(0, 0) + slices.run_count(0, 0) +
         slices.zigzag_slice(0, 0) + slices.rows(0) + slices.position(0, 0) +
         mk::ring_attention::most_rows(5, 2, 0);
}

__device__ int64_t use(const mk::ring_attention::Schedule& schedule) {
  const auto sizes =
      schedule.row_bytes() + schedule.slot_bytes() + schedule.area_bytes() + schedule.chunk_offset(0, 0);
  return static_cast<int64_t>(sizes) + use(schedule.slices) + schedule.rows(0) + schedule.chunks(0) +
         schedule.chunk_begin(0) + schedule.chunk_count(0, 0) + schedule.head_offset(true, 0, 0, 1) +
         schedule.flag(0, 0) + schedule.num_flags() + schedule.signal(0, 0) + schedule.writer(0, 0) +
         schedule.relays(0) + schedule.needs(0, 0, 0) + schedule.node_needs(0, 0, 0) + schedule.source_at(0);
}

__device__ int64_t use(const mk::ring_attention_backward::Schedule& schedule) {
  const auto sizes = schedule.row_bytes() + schedule.chunk_bytes(0, 0) + schedule.partial_offset(0, 0, 0, 0) +
                     schedule.send_offset(0, 0, 0) + schedule.sum_offset(0, 0) + schedule.area_bytes();
  return static_cast<int64_t>(sizes) + use(schedule.gather) + use(schedule.reduce) + schedule.flag(0, 0, 0, 0) +
         schedule.signal(0, 0);
}

}  // namespace

__global__ void use_attention_schedules(mk::ring_attention_backward::Schedule schedule, int64_t* out) {
  *out = use(schedule);
}

__global__ void use_schedules(mk::TopologyView view, mk::ControlLayout layout,
                              mk::gemm_allreduce::Schedule schedule, mk::EntryRecord* entry, int64_t* out) {
  *out = use(view) + use(layout) + use(schedule) + mk::ceil_div(3, 2) + mk::round_up(3, 2) +
         mk::rows_begin(5, 2, 1) + mk::rows_count(5, 2, 1) + mk::num_chunks(5, 2) + mk::bank_of(entry->epoch);
}
