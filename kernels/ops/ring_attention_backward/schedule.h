// SPDX-License-Identifier: MIT
// Gradients of ring attention: the ways of dK and dV. Host and device.
//
// Keys and values travel as in the forward call. Every rank that needed a chunk computes its part of the
// chunk's dK and dV, in fp32, and pushes it into a slot at the chunk's reducer in its node: the owner in the
// owner's node, the owner's rail peer in the others. The reducer sums the parts in local-rank order and,
// outside the owner's node, puts the node's sum to the owner, which adds the node sums in node order. Slots,
// flags and signals are those of GEMM+ReduceScatter over rows of fp32 dK and dV.
#pragma once

#include "../gemm_reduce_scatter/schedule.h"
#include "../ring_attention/schedule.h"

namespace mk::ring_attention_backward {

struct Schedule {
  ring_attention::Schedule gather;
  // Its rows are those of slots: gather.slot_rows of every owner. How many there are in fact, gather says.
  gemm_reduce_scatter::Schedule reduce;

  MK_HOST_DEVICE size_t row_bytes() const { return reduce.row_bytes(); }  // dK and dV, all batches and heads
  MK_HOST_DEVICE size_t chunk_bytes(int owner, int chunk) const {
    return static_cast<size_t>(gather.chunk_count(owner, chunk)) * row_bytes();
  }

  // Places in the area, behind the forward call's; a chunk's part is [dK, dV][batch][kv_head][row][dim], fp32.
  MK_HOST_DEVICE size_t partial_offset(int owner, int node, int local_source, int chunk) const {
    return gather.area_bytes() +
           reduce.partial_offset(node, reduce.reduction(owner, node), local_source, gather.chunk_begin(chunk));
  }
  MK_HOST_DEVICE size_t send_offset(int owner, int node, int chunk) const {
    return gather.area_bytes() +
           reduce.send_offset(node, reduce.reduction(owner, node), gather.chunk_begin(chunk));
  }
  MK_HOST_DEVICE size_t sum_offset(int source_node, int chunk) const {
    return gather.area_bytes() + reduce.sum_offset(source_node, gather.chunk_begin(chunk));
  }
  MK_HOST_DEVICE size_t area_bytes() const { return gather.area_bytes() + reduce.area_bytes(); }

  // Flag at the reducer: the part of `local_source` is there. Signal at the owner: the sum of `source_node` is.
  MK_HOST_DEVICE int flag(int owner, int node, int local_source, int chunk) const {
    return gather.num_flags() + reduce.flag(reduce.reduction(owner, node), local_source, chunk);
  }
  MK_HOST_DEVICE int signal(int source_node, int chunk) const {
    return gather.num_flags() + reduce.signal(source_node, chunk);
  }
};

}  // namespace mk::ring_attention_backward
