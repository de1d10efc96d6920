// SPDX-License-Identifier: MIT
// Gradients of ring attention over packed sequences on GPUs: what the two kernels of a call are given.
#pragma once

#include "kernels/ops/ring_attention/cuda_packed_params.h"
#include "kernels/ops/ring_attention_backward/cuda_params.h"
#include "kernels/ops/ring_attention_backward/packed_blocks.h"

namespace mk::ring_attention_backward {

// Behind the forward call's.
constexpr int PACKED_D_O = ring_attention::NUM_PACKED_MAPS;

struct PackedParams : ring_attention::PackedCommon<PACKED_D_O + 1> {
  GradientPanels panels;
  float scale;
  HeadRows dq;
  HeadRows dk;
  HeadRows dv;
};
using PackedArguments = ring_attention::PackedArguments<PackedParams>;

struct PackedRowSumParams {
  RowSumParams sums;  // strides of heads, when they lie apart by all rows, are the kernel's
  PackedSlices slices;
  bool heads_first;
};

}  // namespace mk::ring_attention_backward
