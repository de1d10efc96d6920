// SPDX-License-Identifier: MIT
#include "operators.h"

namespace perf {

const std::vector<const Operator*>& all_operators() {
  static const std::vector<const Operator*> operators = {
      &kAllgatherGemm,   &kAllgatherGemmWgrad, &kGemmReduceScatter, &kGemmAllreduce,
      &kMoeDispatchGemm, &kMoeGemmCombine,     &kRingAttention,     &kRingAttentionBackward};
  return operators;
}

const Operator* find_operator(const std::string& name) {
  for (const Operator* candidate : all_operators()) {
    if (name == candidate->name) return candidate;
  }
  return nullptr;
}

}  // namespace perf
