// SPDX-License-Identifier: MIT
#include "ring_attention_arguments.h"

#include <cmath>

#include "../kernels/ops/ring_attention/schedule.h"
#include "argument_checks.h"

namespace mk {
namespace {

constexpr int kMaxHeads = 1 << 20;
constexpr int kMaxDim = 1024;
constexpr int kMaxSequences = INT32_MAX - 1;  // cu_seqlens has one entry more

Status check_heads(const RingAttentionCall& call) {
  const auto in_range = [&](const char* name, int value) {
    if (value >= 1 && value <= kMaxHeads) return Status();
    return invalid(call.op, format("%s: expected 1 to %d, saw %d", name, kMaxHeads, value));
  };
  MK_RETURN_IF_ERROR(in_range("heads", call.heads));
  MK_RETURN_IF_ERROR(in_range("kv_heads", call.kv_heads));
  if (call.heads % call.kv_heads != 0) {
    return invalid(call.op,
                   format("kv_heads: expected a divisor of heads (%d), saw %d", call.heads, call.kv_heads));
  }
  if (call.dim < 8 || call.dim > kMaxDim || call.dim % 8 != 0) {
    return invalid(call.op,
                   format("dim: expected a multiple of 8 from 8 to %d, so that rows are 16-byte aligned, "
                          "saw %d",
                          kMaxDim, call.dim));
  }
  return {};
}

// What arguments and maxima have in common. Maxima may be for packed calls and for batches of others.
Status check_sizes(const RingAttentionCall& call) {
  MK_RETURN_IF_ERROR(check_size(call.op, "batch", call.batch));
  MK_RETURN_IF_ERROR(check_size(call.op, "seq", call.seq));
  MK_RETURN_IF_ERROR(check_heads(call));
  MK_RETURN_IF_ERROR(check_product(call.op, "q", call.batch, int64_t{call.heads} * call.dim));
  MK_RETURN_IF_ERROR(check_product(call.op, "q", call.batch * call.heads * call.dim, call.seq));
  if (call.num_sequences < 0 || call.num_sequences > kMaxSequences) {
    return invalid(call.op,
                   format("num_sequences: expected 0 to %d, saw %d", kMaxSequences, call.num_sequences));
  }
  if (call.num_sequences > 0 && call.seq > INT32_MAX) {
    return invalid(call.op, format("seq: expected at most %d with packed sequences (cu_seqlens has 32 bits), "
                                   "saw %lld",
                                   INT32_MAX, static_cast<long long>(call.seq)));
  }
  return check_dtype(call.op, "dtype", call.dtype, false);
}

Status check_modes(const RingAttentionCall& call) {
  if (call.causal < MK_CAUSAL_NONE || call.causal > MK_CAUSAL_ZIGZAG)
    return invalid(call.op, format("causal: expected one of mk_causal_t, saw %d", call.causal));
  if (call.layout != MK_ATTENTION_BSHD && call.layout != MK_ATTENTION_BHSD) {
    return invalid(call.op,
                   format("layout: expected MK_ATTENTION_BSHD or MK_ATTENTION_BHSD, saw %d", call.layout));
  }
  if (!std::isfinite(call.scale))
    return invalid(call.op, format("softmax_scale: expected a finite number, saw %g", call.scale));
  if (call.num_sequences > 0 && call.batch != 1) {
    return invalid(call.op, format("batch: expected 1 with packed sequences, saw %lld",
                                   static_cast<long long>(call.batch)));
  }
  if (call.num_sequences == 0 && call.cu_seqlens != nullptr) {
    return invalid(call.op, format("num_sequences: expected at least 1 with cu_seqlens, saw 0"));
  }
  return {};
}

// The fields that the argument structs have in common.
template <class Arguments>
Result<RingAttentionCall> read_ring_attention(mk_operator_t op, const Arguments* from, Arguments& args) {
  MK_RETURN_IF_ERROR(read_struct_of(op, from, sizeof(Arguments), "args", args));
  RingAttentionCall call;
  call.op = op;
  call.batch = args.batch;
  call.seq = args.seq;
  call.heads = args.heads;
  call.kv_heads = args.kv_heads;
  call.dim = args.dim;
  call.num_sequences = args.num_sequences;
  call.dtype = args.dtype == MK_DTYPE_DEFAULT ? MK_DTYPE_BF16 : args.dtype;
  call.causal = args.causal;
  call.layout = args.layout;
  call.scale = args.softmax_scale;
  call.cu_seqlens = args.cu_seqlens;
  call.q = args.q;
  call.k = args.k;
  call.v = args.v;
  MK_RETURN_IF_ERROR(read_tuning(op, args.tuning, call.tuning));
  MK_RETURN_IF_ERROR(check_sizes(call));
  MK_RETURN_IF_ERROR(check_modes(call));
  if (call.scale == 0) call.scale = static_cast<float>(1 / std::sqrt(static_cast<double>(call.dim)));
  return call;
}

Status check_words(const RingAttentionCall& call, const char* name, const void* data, int64_t count) {
  if (data == nullptr) {
    return invalid(call.op, format("%s: expected a pointer to %lld elements, saw NULL", name,
                                   static_cast<long long>(count)));
  }
  if (reinterpret_cast<uintptr_t>(data) % 4 == 0) return {};
  return invalid(call.op, format("%s: expected a pointer aligned to its 4-byte elements, saw %p", name, data));
}

}  // namespace

Result<RingAttentionCall> to_call(const mk_ring_attention_args_t* from) {
  mk_ring_attention_args_t args;
  Result<RingAttentionCall> call = read_ring_attention(MK_OPERATOR_RING_ATTENTION, from, args);
  if (!call.ok()) return call;
  call->o = args.o;
  call->lse = args.lse;
  return call;
}

Result<RingAttentionCall> to_call(const mk_ring_attention_backward_args_t* from) {
  mk_ring_attention_backward_args_t args;
  Result<RingAttentionCall> call = read_ring_attention(MK_OPERATOR_RING_ATTENTION_BACKWARD, from, args);
  if (!call.ok()) return call;
  call->forward_o = args.o;
  call->forward_lse = args.lse;
  call->d_o = args.d_o;
  call->dq = args.dq;
  call->dk = args.dk;
  call->dv = args.dv;
  return call;
}

Result<RingAttentionCall> to_call(mk_operator_t op, const mk_ring_attention_maxima_t* from) {
  mk_ring_attention_maxima_t maxima;
  MK_RETURN_IF_ERROR(read_struct_of(op, from, sizeof(mk_ring_attention_maxima_t), "maxima", maxima));
  RingAttentionCall call;
  call.op = op;
  call.batch = maxima.batch;
  call.seq = maxima.seq;
  call.heads = maxima.heads;
  call.kv_heads = maxima.kv_heads;
  call.dim = maxima.dim;
  call.num_sequences = maxima.num_sequences;
  call.dtype = maxima.dtype == MK_DTYPE_DEFAULT ? MK_DTYPE_BF16 : maxima.dtype;
  MK_RETURN_IF_ERROR(read_tuning(op, maxima.tuning, call.tuning));
  MK_RETURN_IF_ERROR(check_sizes(call));
  return call;
}

Status check_buffers(const RingAttentionCall& call, int rank, int nranks) {
  const bool zigzag = call.causal == MK_CAUSAL_ZIGZAG;
  const ring_attention::Slices whole{call.seq, nranks, zigzag, zigzag, 0, nullptr};
  // What a rank holds of sequences packed zigzag, cu_seqlens says when the launch runs: pointers are asked for
  // in any case, and may not be the same.
  const bool unknown = zigzag && call.num_sequences > 0;
  const int64_t rows = unknown ? min_of(1, call.seq) : whole.rows(rank);
  const auto tensor = [&](const char* name, const void* data, int heads) {
    return Matrix{name, data, call.batch * rows * heads, call.dim, call.dim, 2};
  };
  const int64_t num_lse = call.batch * call.heads * rows;
  const bool forward = call.op == MK_OPERATOR_RING_ATTENTION;
  const void* lse_data = forward ? call.lse : call.forward_lse;
  const Matrix lse{"lse", lse_data, lse_data ? 1 : 0, num_lse, num_lse, 4};
  std::vector<Matrix> inputs{tensor("q", call.q, call.heads), tensor("k", call.k, call.kv_heads),
                             tensor("v", call.v, call.kv_heads)};
  std::vector<Matrix> outputs;
  if (forward) {
    outputs = {tensor("o", call.o, call.heads)};
  } else {
    inputs.push_back(tensor("o", call.forward_o, call.heads));
    inputs.push_back(tensor("d_o", call.d_o, call.heads));
    outputs = {tensor("dq", call.dq, call.heads), tensor("dk", call.dk, call.kv_heads),
               tensor("dv", call.dv, call.kv_heads)};
  }
  for (const auto* list : {&inputs, &outputs}) {
    for (const Matrix& matrix : *list) MK_RETURN_IF_ERROR(check_matrix(call.op, matrix));
  }
  if (num_lse > 0 && (lse_data != nullptr || !forward))
    MK_RETURN_IF_ERROR(check_words(call, "lse", lse_data, num_lse));
  const Matrix cu_seqlens{"cu_seqlens",           call.cu_seqlens,        call.num_sequences > 0 ? 1 : 0,
                          call.num_sequences + 1, call.num_sequences + 1, 4};
  if (call.num_sequences > 0)
    MK_RETURN_IF_ERROR(check_words(call, "cu_seqlens", call.cu_seqlens, int64_t{call.num_sequences} + 1));
  (forward ? outputs : inputs).push_back(lse);
  inputs.push_back(cu_seqlens);
  for (auto* list : {&inputs, &outputs}) {
    for (Matrix& matrix : *list) {
      if (unknown && !matrix.empty()) matrix.rows = matrix.columns = 1;
    }
  }
  for (size_t at = 0; at < outputs.size(); ++at) {
    for (const Matrix& input : inputs) MK_RETURN_IF_ERROR(check_apart(call.op, outputs[at], input));
    for (size_t other = 0; other < at; ++other)
      MK_RETURN_IF_ERROR(check_apart(call.op, outputs[at], outputs[other]));
  }
  return {};
}

}  // namespace mk
