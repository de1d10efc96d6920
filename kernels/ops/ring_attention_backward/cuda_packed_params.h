// SPDX-License-Identifier: MIT
// Gradients of ring attention over packed sequences on GPUs: what the two kernels of a call are given.
#pragma once

#include "kernels/ops/ring_attention/cuda_packed_params.h"
#include "kernels/ops/ring_attention_backward/cuda_params.h"
#include "kernels/ops/ring_attention_backward/packed_blocks.h"

namespace mk::ring_attention_backward {

// Behind the forward call's.
constexpr int PACKED_D_O = ring_attention::NUM_PACKED_MAPS;

template <class Panels>
struct PackedParamsOf : ring_attention::PackedCommon<PACKED_D_O + 1> {
  Panels panels;
  int num_key_tiles;  // seen or not, which the kernel counts
  int heads_at_once;  // and chooses
  float scale;
  HeadRows dq;
  HeadRows dk;
  HeadRows dv;
};

// Inside a node.
using PackedParams = PackedParamsOf<GradientPanels>;

// Between nodes.
struct PackedNetworkParams : PackedParamsOf<PackedNetworkGradientPanels>, ring_attention::BetweenNodes {
  PartRoutes routes;
};

struct PackedRowSumParams {
  RowSumParams sums;  // strides of heads, when they lie apart by all rows, are the kernel's
  PackedSlices slices;
  bool heads_first;
};

}  // namespace mk::ring_attention_backward
