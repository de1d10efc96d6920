// SPDX-License-Identifier: MIT
// The C interface of the GEMM operators.
#include "api_operator.h"
#include "gemm_arguments.h"

using namespace mk;
using namespace mk::api;

extern "C" {
MK_OPERATOR_FUNCTIONS(allgather_gemm, MK_OPERATOR_ALLGATHER_GEMM, mk_gemm_maxima_t, checked_call)
MK_OPERATOR_FUNCTIONS(gemm_reduce_scatter, MK_OPERATOR_GEMM_REDUCE_SCATTER, mk_gemm_maxima_t, checked_call)
MK_OPERATOR_FUNCTIONS(gemm_allreduce, MK_OPERATOR_GEMM_ALLREDUCE, mk_gemm_maxima_t, checked_call)
}
