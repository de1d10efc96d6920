// SPDX-License-Identifier: MIT
// Launches ring attention.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/cuda/ring_attention_plan.h"
#include "kernels/device/rank_comm.h"

namespace mk {

// Loads the kernels on the current device; may synchronise. Once a device, before the first launch.
cudaError_t ring_attention_prepare(bool between_nodes);

// Enqueues exactly one kernel of the plan's CTAs, which must be able to be resident together. `comm` is
// complete but for what is the call's. Allocates nothing, waits for nothing, may be captured.
cudaError_t ring_attention_launch(const RingAttentionCall& call, const RingAttentionPlan& plan,
                                  const RankComm& comm, cudaStream_t stream);

}  // namespace mk
