// SPDX-License-Identifier: MIT
// From the public argument structs of ring attention to one checked call.
#pragma once

#include "../kernels/operator_call.h"
#include "status.h"

namespace mk {

// Defaults filled in, sizes and types checked; pointers taken over unseen.
Result<RingAttentionCall> to_call(const mk_ring_attention_args_t* args);
Result<RingAttentionCall> to_call(const mk_ring_attention_backward_args_t* args);
// The largest call of `maxima`, without buffers.
Result<RingAttentionCall> to_call(mk_operator_t op, const mk_ring_attention_maxima_t* maxima);

// Checks pointers, alignment and overlap for a rank of `nranks`. What cu_seqlens holds is the launch's matter.
Status check_buffers(const RingAttentionCall& call, int rank, int nranks);

}  // namespace mk
