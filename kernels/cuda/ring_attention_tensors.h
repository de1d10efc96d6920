// SPDX-License-Identifier: MIT
// A caller's tensors of ring attention as kernels address them.
#pragma once

#include <algorithm>

#include "kernels/cuda/gemm_type.h"
#include "kernels/cuda/ring_attention_plan.h"
#include "kernels/gemm/tensor_map.h"
#include "kernels/ops/ring_attention/cuda_packed_params.h"
#include "kernels/ring_attention_call.h"

namespace mk {

// Bytes from one row, head and batch to the next.
struct AttentionStrides {
  int64_t row, head, batch;
};
inline AttentionStrides attention_strides(const RingAttentionCall& call, int heads, int64_t rows) {
  const int64_t dim_bytes = int64_t{call.dim} * 2;
  if (call.layout == MK_ATTENTION_BHSD) return {dim_bytes, rows * dim_bytes, heads * rows * dim_bytes};
  return {heads * dim_bytes, dim_bytes, rows * heads * dim_bytes};
}

// `any`: a valid address for a tensor without elements.
inline bool encode_attention_map(CUtensorMap* map, const RingAttentionCall& call, const void* data,
                                 const void* any, int heads, int64_t rows, int box_rows) {
  const AttentionStrides strides = attention_strides(call, heads, std::max<int64_t>(1, rows));
  return encode_tensor_map_4d(map, gemm_type(call.dtype), rows > 0 && call.batch > 0 ? data : any,
                              {call.dim, rows, heads, call.batch}, {strides.row, strides.head, strides.batch},
                              box_rows, 64);
}

// Of packed sequences only the kernel knows, when zigzag, how many rows a rank has: then maps are for one.
inline bool knows_rows(const RingAttentionCall& call) { return call.causal != MK_CAUSAL_ZIGZAG; }
inline int64_t rows_of_maps(const RingAttentionCall& call, int64_t rows_of_one_sequence) {
  return knows_rows(call) ? rows_of_one_sequence : std::min<int64_t>(1, call.seq);
}

template <class Params>
bool encode_packed_map(ring_attention::PackedArguments<Params>* arguments, int which,
                       const RingAttentionCall& call, const void* data, int heads, int64_t rows, int box_rows) {
  const RankComm& comm = arguments->params.comm;
  const void* any = comm.memory[comm.rank] + comm.arena;  // a valid address for tensors without elements
  return encode_attention_map(&arguments->maps[which], call, data, any, heads, rows, box_rows);
}

// What both directions have in common.
template <class Params>
void fill_packed_arguments(const RingAttentionCall& call, const ring_attention::PackedPlan& plan,
                           const RankComm& comm, int block_m,
                           ring_attention::PackedArguments<Params>* arguments) {
  Params& params = arguments->params;
  params.comm = comm;
  params.tiles = {plan.slices, comm.rank, call.heads, call.kv_heads, block_m, plan.joint_heads};
  params.dim = call.dim;
  arguments->table_offset = plan.table_offset;
  arguments->is_empty = call.batch == 0 || call.seq == 0;
  arguments->rows_are_known = knows_rows(call);
  arguments->heads_first = call.layout == MK_ATTENTION_BHSD;
}

}  // namespace mk
