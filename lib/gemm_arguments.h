// SPDX-License-Identifier: MIT
// From the public argument structs of the GEMM operators to one checked call.
#pragma once

#include "../kernels/operator_call.h"
#include "status.h"

namespace mk {

// Defaults filled in, sizes and types checked; pointers taken over unseen.
Result<GemmCall> to_call(const mk_allgather_gemm_args_t* args);
Result<GemmCall> to_call(const mk_gemm_reduce_scatter_args_t* args);
Result<GemmCall> to_call(const mk_gemm_allreduce_args_t* args);
// The largest call of `maxima`, without buffers.
Result<GemmCall> to_call(mk_operator_t op, const mk_gemm_maxima_t* maxima);

// Checks pointers, alignment, leading dimensions and overlap for a rank of `nranks`.
Status check_buffers(const GemmCall& call, int rank, int nranks);

}  // namespace mk
