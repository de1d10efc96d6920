// SPDX-License-Identifier: MIT
// Where the tests' shapes and layouts come from.
#pragma once

#include <vector>

#include "gemm_problem.h"

namespace mk::test {

inline constexpr mk_operator_t kGemmOperators[] = {MK_OPERATOR_ALLGATHER_GEMM, MK_OPERATOR_GEMM_REDUCE_SCATTER,
                                                   MK_OPERATOR_GEMM_ALLREDUCE};

// node_of_rank of jobs from 1 to 16 ranks on 1 to 4 nodes, even and uneven, in several rank orders.
const std::vector<std::vector<int32_t>>& node_layouts();

// The corners: empty sizes, fewer rows than ranks, one row, and the features one by one.
std::vector<GemmCase> corner_cases(mk_operator_t op, int nranks);

// Case number `index` of an endless series that mixes everything, the same for everyone.
GemmCase mixed_case(uint64_t seed, uint64_t index, int nranks);
std::vector<GemmCase> mixed_cases(uint64_t seed, size_t count, int nranks);

}  // namespace mk::test
