// SPDX-License-Identifier: MIT
// Every function of the expert layers' schedules compiles for the device. Compiled, never run.
#include "kernels/ops/moe_dispatch_gemm/schedule.h"
#include "kernels/ops/moe_gemm_combine/schedule.h"
#include "kernels/ops/moe_routing/record.h"

namespace {

__device__ int64_t use(const mk::moe::Routing& routing) {
  const auto bytes =
      routing.block_bytes() + routing.counts_offset(0) + routing.counts_bytes() + routing.route_bytes();
  return static_cast<int64_t>(bytes) + routing.owner(0) + routing.first_expert(0) + routing.num_experts(0) +
         routing.received_at(0) + routing.head(0).tokens + routing.expert_rows(0, 0) + routing.rank_rows(0, 0) +
         routing.rank_tokens(0, 0) + routing.node_rows(0, 0) + routing.node_tokens(0, 0) +
         routing.rows_of_rank(0) + routing.rows_of_expert(0) + routing.relay(0, 0) + routing.relays(0, 0) +
         routing.relay_index(0, 0) + routing.relay_indices() + routing.chunks(1) + routing.chunk_of(1, 0) +
         routing.chunk_begin(1, 0) + routing.chunk_count(1, 0) + routing.counts_flag(0) + routing.first_flag() +
         routing.counts_signal(0) + routing.first_signal();
}

__device__ int64_t use(const mk::moe_dispatch_gemm::Schedule& schedule) {
  return static_cast<int64_t>(schedule.packet_bytes() + schedule.route_offset() + schedule.offset(0)) +
         schedule.receive_begin(0, 0) + schedule.relay_begin(0, 0) + schedule.pack_begin(0, 0) +
         schedule.flag(0, 0) + schedule.signal(0, 0, 0) +
         mk::moe::decide(schedule, schedule.area_bytes(0)).kind;
}

__device__ int64_t use(const mk::moe_gemm_combine::Schedule& schedule) {
  const auto places = schedule.row_bytes() + schedule.row_offset(0) + schedule.sum_send_offset(0, 0, 0) +
                      schedule.sum_offset(0, 0, 0) + schedule.route_offset(0, 0, 0) +
                      schedule.route_send_offset(0, 0, 0);
  return static_cast<int64_t>(places) + schedule.collector(0, 0) + schedule.collects(0, 0) +
         schedule.collect_begin(0, 0) + schedule.list_begin(0, 0, 0) + schedule.flag(0, 0, 0) +
         schedule.route_signal(0, 0, 0) + schedule.sum_signal(0, 0) +
         mk::moe::decide(schedule, schedule.area_bytes(0)).rank;
}

__device__ int64_t use(mk_moe_routing_t* record) {
  const mk::moe::RecordView view{record};
  const mk::moe::RecordLayout layout{1, 1, 1};
  return mk::moe::record_usable(record, 0, layout, 1, 0, 1) + view.head()->topk + *view.expert_counts() +
         *view.expert_offsets() + view.items()->slot + view.rows()->k;
}

}  // namespace

__global__ void use_moe_schedules(mk::moe_dispatch_gemm::Schedule dispatch,
                                  mk::moe_gemm_combine::Schedule combine, mk_moe_routing_t* record,
                                  int64_t* out) {
  *out = use(dispatch.routing) + use(dispatch) + use(combine) + use(record);
}
