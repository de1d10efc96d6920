// SPDX-License-Identifier: MIT
// Launches the gradients of ring attention.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/cuda/ring_attention_backward_plan.h"
#include "kernels/device/rank_comm.h"

namespace mk {

// As ring_attention_prepare().
cudaError_t ring_attention_backward_prepare(bool between_nodes);

// Enqueues a small kernel, where there is a query, and one of the plan's CTAs, which must be able to be
// resident together. Otherwise as ring_attention_launch().
cudaError_t ring_attention_backward_launch(const RingAttentionCall& call, const RingAttentionBackwardPlan& plan,
                                           const RankComm& comm, cudaStream_t stream);

}  // namespace mk
