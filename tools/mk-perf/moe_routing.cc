// SPDX-License-Identifier: MIT
#include "moe_routing.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "input_matrix.h"

namespace perf {
namespace {

constexpr uint64_t kSeedRouting = 0xe5;

// Experts of which the i-th in a random order is chosen 1/i times as often as the first.
class ZipfExperts {
 public:
  explicit ZipfExperts(uint64_t experts) : order_(experts), until_(experts) {
    std::iota(order_.begin(), order_.end(), 0);
    std::sort(order_.begin(), order_.end(), [](int32_t a, int32_t b) { return place(a) < place(b); });
    double sum = 0;
    for (size_t i = 0; i < until_.size(); ++i) until_[i] = sum += 1.0 / static_cast<double>(i + 1);
  }
  uint64_t choose(uint64_t hash) const {
    const double at = static_cast<double>(hash >> 11) * 0x1p-53 * until_.back();
    const auto found = std::upper_bound(until_.begin(), until_.end() - 1, at);
    return static_cast<uint64_t>(order_[static_cast<size_t>(found - until_.begin())]);
  }

 private:
  static uint64_t place(int32_t expert) {
    return index_hash(kSeedRouting + 1, static_cast<uint64_t>(expert), 0);
  }

  std::vector<int32_t> order_;
  std::vector<double> until_;  // sums of weights
};

// topk different ones for each token.
std::vector<int32_t> choose_experts(const Shape& shape) {
  const auto num_experts = static_cast<uint64_t>(shape["experts"]);
  const ZipfExperts zipf(num_experts);
  std::vector<int32_t> experts;
  for (int64_t token = 0; token < shape["tokens"]; ++token) {
    const auto first = static_cast<std::ptrdiff_t>(experts.size());
    const auto taken = [&](uint64_t expert) {
      return std::find(experts.begin() + first, experts.end(), static_cast<int32_t>(expert)) != experts.end();
    };
    for (int64_t k = 0; k < shape["topk"]; ++k) {
      const uint64_t hash = index_hash(kSeedRouting, static_cast<uint64_t>(token), static_cast<uint64_t>(k));
      uint64_t expert = shape["zipf"] ? zipf.choose(hash) : hash % num_experts;
      for (int again = 1; taken(expert); ++again)
        expert = shape["zipf"] && again < 64 ? zipf.choose(mix(hash + static_cast<uint64_t>(again)))
                                             : (expert + 1) % num_experts;
      experts.push_back(static_cast<int32_t>(expert));
    }
  }
  return experts;
}

}  // namespace

Slice slice_of(int64_t count, int rank, int nranks) {
  const int64_t part = (count + nranks - 1) / nranks;
  return {std::min(count, rank * part), std::min(count, (rank + 1) * part)};
}

ExpertRouting::ExpertRouting(const Shape& shape, int nranks)
    : ExpertRouting(choose_experts(shape), static_cast<int>(shape["topk"]), shape["experts"], nranks) {}

ExpertRouting::ExpertRouting(std::vector<int32_t> experts, int topk, int64_t num_experts, int nranks)
    : topk_(topk), experts_(std::move(experts)) {
  std::vector<int64_t> rows(static_cast<size_t>(nranks));
  const int64_t per_rank = (num_experts + nranks - 1) / nranks;
  for (const int32_t expert : experts_) ++rows[static_cast<size_t>(expert / per_rank)];
  // An operator takes none for "the worst case".
  capacity_ = std::max<int64_t>(1, *std::max_element(rows.begin(), rows.end()));
  std::vector<int64_t> next(static_cast<size_t>(num_experts) + 1);
  for (const int32_t expert : experts_) ++next[static_cast<size_t>(expert) + 1];
  for (size_t expert = 1; expert < next.size(); ++expert) next[expert] += next[expert - 1];
  first_rows_ = next;
  for (const int32_t expert : experts_) row_numbers_.push_back(next[static_cast<size_t>(expert)]++);
}

std::vector<ExpertRow> ExpertRouting::rows_of(Slice experts) const {
  std::vector<std::vector<ExpertRow>> by_expert(static_cast<size_t>(experts.end - experts.begin));
  for (size_t at = 0; at < experts_.size(); ++at) {
    const int32_t expert = experts_[at];
    if (expert < experts.begin || expert >= experts.end) continue;
    by_expert[static_cast<size_t>(expert - experts.begin)].push_back(
        {static_cast<int64_t>(at) / topk_, static_cast<int>(at % static_cast<size_t>(topk_)), expert});
  }
  std::vector<ExpertRow> rows;
  for (const auto& more : by_expert) rows.insert(rows.end(), more.begin(), more.end());
  return rows;
}

}  // namespace perf
