// SPDX-License-Identifier: MIT
// From the public argument structs of the mixture-of-experts operators to one checked call.
#pragma once

#include "../kernels/operator_call.h"
#include "status.h"

namespace mk {

// Defaults filled in, sizes and types checked; pointers taken over unseen.
Result<MoeCall> to_call(const mk_moe_dispatch_gemm_args_t* args);
Result<MoeCall> to_call(const mk_moe_gemm_combine_args_t* args);
// The largest calls of `maxima`, without buffers.
Result<MoeCall> to_call(mk_operator_t op, const mk_moe_maxima_t* maxima);

// Checks pointers, alignment, leading dimensions, overlap and the size of the record for a rank of `nranks`.
Status check_buffers(const MoeCall& call, int rank, int nranks);

Result<size_t> routing_bytes(const mk_moe_maxima_t* maxima, int nranks);

}  // namespace mk
