// SPDX-License-Identifier: MIT
// How the gradients of ring attention are computed on GPUs: pure host code, as ring_attention_plan.h.
#pragma once

#include "kernels/cuda/ring_attention_plan.h"
#include "kernels/ops/ring_attention_backward/circular_blocks.h"
#include "kernels/ops/ring_attention_backward/cuda_blocks.h"
#include "kernels/ops/ring_attention_backward/network_parts.h"

namespace mk {

struct RingAttentionBackwardPlan {
  mk_plan_t plan;
  ring_attention::QueryTiles tiles;
  ring_attention_backward::KeyTiles key_tiles;
  ring_attention_backward::CircularKeyTiles circular;  // then key_tiles are not used; no heads: they are
  ring_attention_backward::GradientPanels panels;
  int num_key_tiles = 0;
  int num_push_ctas = 0;
  int64_t area_bytes = 0;  // of a receive bank, for any causal mode
  ring_attention::PackedPlan packed;
  // Between nodes; then key_tiles and what only `panels` has are not used. `network` of packed sequences as if
  // they were one.
  ring_attention_backward::NetworkGradientPanels network;
  ring_attention_backward::PackedNetworkGradientPanels packed_network;
  ring_attention_backward::PartRoutes routes;
  ring_attention::NodeRanks nodes;
  int num_forward_ctas = 0;

  bool is_circular() const { return circular.num_heads > 0; }
  ring_attention_backward::QueryRowPlaces row_places() const {
    if (packed_network.num_slots > 0) return packed_network.row_places();
    return network.num_slots > 0 ? network.row_places() : panels.row_places();
  }
  ring_attention_backward::QuerySumPlaces query_sums() const {
    if (packed_network.num_slots > 0) return packed_network.query_sums();
    return network.num_slots > 0 ? network.query_sums() : panels.query_sums();
  }
};

// MK_ERROR_UNSUPPORTED says in words what is not built. `nodes`: who is where, if there are several.
Result<RingAttentionBackwardPlan> ring_attention_backward_plan(const RingAttentionCall& call, int rank,
                                                               int nranks, int num_sms,
                                                               const TopologyView* nodes = nullptr);

}  // namespace mk
