// SPDX-License-Identifier: MIT
// How the gradients of ring attention are computed on the GPUs of a node: pure host code, as
// ring_attention_plan.h.
#pragma once

#include "kernels/cuda/ring_attention_plan.h"
#include "kernels/ops/ring_attention_backward/cuda_blocks.h"

namespace mk {

struct RingAttentionBackwardPlan {
  mk_plan_t plan;
  ring_attention::QueryTiles tiles;
  ring_attention_backward::KeyTiles key_tiles;
  ring_attention_backward::GradientPanels panels;
  int num_key_tiles = 0;
  int num_push_ctas = 0;
  int64_t area_bytes = 0;  // of a receive bank, for any causal mode
  ring_attention::PackedPlan packed;
};

// MK_ERROR_UNSUPPORTED says in words what is not built.
Result<RingAttentionBackwardPlan> ring_attention_backward_plan(const RingAttentionCall& call, int rank,
                                                               int nranks, int num_sms);

}  // namespace mk
