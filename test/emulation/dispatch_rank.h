// SPDX-License-Identifier: MIT
// One rank of MoE dispatch + GEMM on an emulated GPU: what its kernel is given, and the record that it leaves.
#pragma once

#include "expert_rank.h"
#include "kernels/ops/moe_dispatch_gemm/cuda_push.cuh"

namespace mk::test {

inline uint16_t element(uint64_t seed, int rank, int64_t token, int64_t column) {
  return static_cast<uint16_t>(seed * 40503 + static_cast<uint64_t>(rank) * 9973 +
                               static_cast<uint64_t>(token) * 331 + static_cast<uint64_t>(column) * 7);
}
inline float factor(uint64_t seed, int rank, int64_t item) {
  return static_cast<float>((seed * 3 + static_cast<uint64_t>(rank) * 5 + static_cast<uint64_t>(item)) % 97);
}

class DispatchRank : public ExpertRank {
 public:
  using ExpertRank::ExpertRank;

  std::string wrong_record(const moe_dispatch_gemm::CudaParams& params) const {
    const moe::RecordItem* const items = params.routing.items;
    const std::vector<int32_t> slots = this->slots();
    for (size_t i = 0; i < topk_idx_.size(); ++i) {
      if (items[i].expert != topk_idx_[i] || items[i].slot != slots[i])
        return format("item %zu of the record is %d, %d; ", i, items[i].expert, items[i].slot);
    }
    return params.routing.record->status == MK_SUCCESS ? "" : "the record has no success; ";
  }
  void spoil_index(size_t item, int32_t value) { topk_idx_[item] = value; }

 protected:
  // All but what a record and rows of its own node or of others need.
  MoeCall make_call(const ExpertShape& shape, uint64_t seed, bool reads_record) {
    MoeCall call = begin_call(MK_OPERATOR_MOE_DISPATCH_GEMM, shape, seed);
    topk_idx_ = own();
    call.topk_idx = topk_idx_.data();
    call.capacity_rows = shape.tokens * rank_.nranks * std::min(shape.topk, shape.experts);
    // A dispatch by the record has the one that the launch before it wrote.
    if (reads_record) {
      call.routing = reinterpret_cast<mk_moe_routing_t*>(record_.data());
      call.routing_bytes = record_.size() * sizeof(Line);
    } else {
      make_record(&call, call.capacity_rows);
    }
    call.use_routing = reads_record;
    return call;
  }
  // As the launch makes them.
  void describe(const MoeCall& call, const MoePlan& plan, moe_dispatch_gemm::CudaParams* params) {
    params->comm = comm(call);
    params->routing = cuda_routing(call, rank_.rank, rank_.nranks, arrays_.view().num_nodes);
    params->routing.num_counting_ctas = 2;
    params->layout = plan.layout;
    params->first_flag = rank_.nranks;
    params->blocks_per_source = plan.blocks_per_source;
    const auto row_bytes = static_cast<int>(plan.layout.row_bytes);
    params->unit_rows = moe::unit_rows_for(row_bytes);
    params->piece_rows = std::clamp(PUSH_CTA_PIECE_BYTES / row_bytes, 1, 32);
    params->piece_bytes =
        static_cast<int>(round_up(ceil_div(row_bytes, ceil_div(row_bytes, PUSH_CTA_PIECE_BYTES)), 16));
    params->x_pitch = call.hidden * 2;
    rows_.resize(static_cast<size_t>(call.tokens * call.hidden + 8));
    factors_.resize(own().size() + 1);
    for (int64_t token = 0; token < call.tokens; ++token) {
      for (int64_t column = 0; column < call.hidden; ++column)
        rows_[static_cast<size_t>(token * call.hidden + column)] = element(seed_, rank_.rank, token, column);
    }
    for (size_t i = 0; i < own().size(); ++i) factors_[i] = factor(seed_, rank_.rank, static_cast<int64_t>(i));
    params->x = reinterpret_cast<const std::byte*>(rows_.data());
    params->row_scale = factors_.data();
  }

 private:
  std::vector<int32_t> topk_idx_;
  std::vector<uint16_t> rows_;
  std::vector<float> factors_;
};

}  // namespace mk::test
