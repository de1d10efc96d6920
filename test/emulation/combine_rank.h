// SPDX-License-Identifier: MIT
// One rank of MoE GEMM + combine on an emulated GPU: what its kernel is given, and its tokens' sums, compared
// with loops that add in the order that is promised.
#pragma once

#include "expert_rank.h"

#include <cmath>

#include "kernels/cuda/gemm_type.h"
#include "kernels/host/number_format.h"
#include "kernels/ops/moe_gemm_combine/cuda_params.h"

namespace mk::test {

struct CombineShape : ExpertShape {
  mk_dtype_t out_dtype = MK_DTYPE_BF16;
  int64_t chunk_bytes = 1024;  // between nodes
};

inline uint64_t mix(uint64_t value) {
  value = (value ^ value >> 31) * 0x9e3779b97f4a7c15;
  return value ^ value >> 29;
}
// Of any size and sign, so that sums in another order, or rounded elsewhere, are others.
inline float number(uint64_t bits) { return (static_cast<float>(mix(bits) % 20011) - 10005.0f) / 4096.0f; }
inline float number_of(uint64_t seed, int rank, size_t item, uint64_t place) {
  return number((seed * 32 + static_cast<uint64_t>(rank)) << 40 | item << 20 | place);
}
inline float weight(uint64_t seed, int rank, size_t item) { return number_of(seed, rank, item, 0xfffff); }

class CombineRank : public ExpertRank {
 public:
  using ExpertRank::ExpertRank;
  virtual ~CombineRank() = default;

  moe::RecordItem& record_item(size_t item) { return items_[item]; }

  std::string wrong_result() const {
    for (int64_t token = 0; token <= num_tokens(); ++token) {
      const std::byte* const seen = y_.data()->bytes + token * y_pitch();
      std::vector<std::byte> expected(static_cast<size_t>(y_pitch()), std::byte{0xff});
      if (token < num_tokens()) {
        for (int64_t column = 0; column < shape_.hidden; ++column)
          store_element(expected.data(), shape_.out_dtype, column, sum(token, column));
      }
      if (std::memcmp(seen, expected.data(), expected.size()) == 0) continue;
      size_t at = 0;
      while (seen[at] == expected[at]) ++at;
      return format("token %lld of %lld: byte %zu of %lld; ", (long long)token, (long long)num_tokens(), at,
                    (long long)row_bytes());
    }
    return "";
  }

 protected:
  // Of a row of an expert.
  virtual float product(const Row& row, int expert, int64_t column) const = 0;

  MoeCall make_call(const CombineShape& shape, uint64_t seed) {
    shape_ = shape;
    MoeCall call = begin_call(MK_OPERATOR_MOE_GEMM_COMBINE, shape, seed);
    call.out_dtype = shape.out_dtype;
    call.tuning.chunk_bytes = shape.chunk_bytes;
    fill_record(&call);
    return call;
  }
  // As the launch makes them.
  void describe(const MoeCall& call, const MoePlan& plan, moe_gemm_combine::CudaParams* params) {
    params->comm = comm(call);
    params->routing = cuda_routing(call, rank_.rank, rank_.nranks, arrays_.view().num_nodes);
    params->routing.has_rows = true;
    params->layout = {plan.layout.counts_bytes, row_bytes()};
    params->products.out_type = gemm_type(shape_.out_dtype);
    params->first_flag = rank_.nranks;
    params->unit_rows = moe::unit_rows_for(row_bytes());
    weights_.assign(own().size() + 1, 0);
    for (size_t i = 0; i < own().size(); ++i) weights_[i] = weight(seed_, rank_.rank, i);
    params->weights = weights_.data();
    y_.assign(static_cast<size_t>((num_tokens() + 1) * y_pitch()) / sizeof(Line), Line{});
    std::memset(static_cast<void*>(y_.data()), 0xff, y_.size() * sizeof(Line));
    params->y = y_.data()->bytes;
    params->y_pitch = y_pitch();
  }

  int64_t row_bytes() const { return shape_.hidden * element_bytes(shape_.out_dtype); }

  CombineShape shape_{};

 private:
  int64_t y_pitch() const { return row_bytes() + 16; }
  int node_of(int expert) const { return arrays_.view().node_of_rank[expert / experts_per_rank()]; }

  // As a dispatch would have left it.
  void fill_record(MoeCall* call) {
    const moe::RecordLayout layout{num_experts(), topk_, num_tokens()};
    std::vector<int32_t> counts;
    int64_t num_rows = 0;
    for (int local = 0; local < num_experts(); ++local) {
      counts.push_back(static_cast<int32_t>(rows_of(first_expert() + local).size()));
      num_rows += counts.back();
    }
    make_record(call, num_rows);
    *call->routing = {moe::kRecordMagic,
                      moe::kRecordVersion,
                      MK_SUCCESS,
                      num_experts(),
                      num_tokens(),
                      num_rows,
                      num_rows,
                      layout.counts_offset(),
                      layout.offsets_offset(),
                      layout.rows_offset()};
    const moe::RecordView record{call->routing};
    *record.at<moe::RecordHead>(moe::RecordLayout::kHead) = {rank_.nranks,          rank_.rank, experts_, topk_,
                                                             layout.items_offset(), 0};
    std::copy(counts.begin(), counts.end(), record.expert_counts());
    items_ = record.items();
    const std::vector<int32_t> slots = this->slots();
    for (size_t i = 0; i < own().size(); ++i) items_[i] = {own()[i], slots[i]};
  }

  float rounded(float value) const {
    std::byte bytes[4];
    store_element(bytes, shape_.out_dtype, 0, value);
    return load_element(bytes, shape_.out_dtype, 0);
  }
  // What a node adds for a token to `before`, in the order of the experts.
  float node_sum(int64_t token, int node, int64_t column, float before, bool* has_any) const {
    std::vector<std::pair<int, size_t>> rows;  // expert, item
    for (int k = 0; k < topk_; ++k) {
      const auto item = static_cast<size_t>(token * topk_ + k);
      if (own()[item] >= 0 && node_of(own()[item]) == node) rows.emplace_back(own()[item], item);
    }
    std::sort(rows.begin(), rows.end());
    *has_any = !rows.empty();
    for (const auto& [expert, item] : rows) {
      before = std::fma(weight(seed_, rank_.rank, item), rounded(product({rank_.rank, item}, expert, column)),
                        before);
    }
    return before;
  }
  float sum(int64_t token, int64_t column) const {
    float all = 0;
    for (int node = 0; node < arrays_.view().num_nodes; ++node) {
      bool has_any = false;
      if (node == arrays_.view().node()) {
        all = node_sum(token, node, column, all, &has_any);
      } else {
        const float one = node_sum(token, node, column, 0, &has_any);
        if (has_any) all += rounded(one);
      }
    }
    return all;
  }

  std::vector<float> weights_;
  std::vector<Line> y_;
  moe::RecordItem* items_ = nullptr;
};

}  // namespace mk::test
