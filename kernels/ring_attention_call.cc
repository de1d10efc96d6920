// SPDX-License-Identifier: MIT
#include "ring_attention_call.h"

#include <bit>
#include <cstring>

#include "../lib/status.h"

namespace mk {
namespace {

const char* causal_name(mk_causal_t causal) {
  switch (causal) {
    case MK_CAUSAL_CONTIGUOUS:
      return "causal";
    case MK_CAUSAL_ZIGZAG:
      return "causal zigzag";
    default:
      return "not causal";
  }
}

uint64_t hash_cu_seqlens(const RingAttentionCall& call) {
  uint64_t hash = 0;
  for (int index = 0; index <= call.num_sequences; ++index)
    hash += ring_attention::hash_of_entry(index, call.cu_seqlens[index]);
  return hash;
}

}  // namespace

std::string cu_seqlens_problem(const RingAttentionCall& call) {
  for (int index = 0; index <= call.num_sequences && call.num_sequences > 0; ++index) {
    if (!ring_attention::is_good_entry(call.cu_seqlens, index, call.num_sequences, call.seq))
      return describe(ring_attention::fault_of(call.cu_seqlens, index, call.num_sequences, call.seq));
  }
  return {};
}

std::string describe(const ring_attention::CuSeqlensFault& fault) {
  const long long seen = fault.seen;
  if (fault.index == 0) return format("cu_seqlens[0]: expected 0, saw %lld", seen);
  if (fault.seen < fault.before) {
    return format("cu_seqlens[%d]: expected at least %d (the one before it), saw %lld", fault.index,
                  fault.before, seen);
  }
  return format("cu_seqlens[%d]: expected %lld (seq), saw %lld", fault.index, static_cast<long long>(fault.seq),
                seen);
}

bool equal_but_addresses(const RingAttentionCall& one, const RingAttentionCall& other) {
  return one.op == other.op && one.batch == other.batch && one.seq == other.seq && one.heads == other.heads &&
         one.kv_heads == other.kv_heads && one.dim == other.dim && one.num_sequences == other.num_sequences &&
         one.dtype == other.dtype && one.causal == other.causal && one.layout == other.layout &&
         one.scale == other.scale && std::memcmp(&one.tuning, &other.tuning, sizeof one.tuning) == 0;
}

std::string sizes_of(const RingAttentionCall& call) {
  return format("batch=%lld, seq=%lld, heads=%d, kv_heads=%d, dim=%d, %s", static_cast<long long>(call.batch),
                static_cast<long long>(call.seq), call.heads, call.kv_heads, call.dim, dtype_name(call.dtype));
}

std::array<int64_t, 4> flight_shape(const RingAttentionCall& call) {
  return {call.batch, call.seq, int64_t{call.heads} << 32 | call.kv_heads, call.dim};
}

// Both executors lay their areas out for any causal mode and layout.
bool covers(const RingAttentionCall& maxima, const RingAttentionCall& call) {
  return maxima.op == call.op && maxima.batch >= call.batch && maxima.seq >= call.seq &&
         maxima.heads >= call.heads && maxima.kv_heads >= call.kv_heads && maxima.dim >= call.dim &&
         maxima.num_sequences >= call.num_sequences;
}

RingAttentionCall maxima_of(const RingAttentionCall& call) {
  RingAttentionCall maxima;
  maxima.op = call.op;
  maxima.batch = call.batch;
  maxima.seq = call.seq;
  maxima.heads = call.heads;
  maxima.kv_heads = call.kv_heads;
  maxima.dim = call.dim;
  maxima.num_sequences = call.num_sequences;
  maxima.dtype = call.dtype;
  maxima.tuning = call.tuning;
  return maxima;
}

std::vector<int64_t> agreed_fields(const RingAttentionCall& call) {
  return {call.batch, call.seq, call.heads, call.kv_heads, call.dim, call.num_sequences, call.dtype};
}

void fill_entry(const RingAttentionCall& call, EntryRecord& record) {
  record.shape[0] = call.batch;
  record.shape[1] = call.seq;
  record.shape[2] = int64_t{call.heads} << 32 | call.kv_heads;
  record.shape[3] = int64_t{call.dim} << 32 | call.num_sequences;
  record.dtypes = static_cast<uint32_t>(call.dtype);
  record.modes[0] = uint64_t{std::bit_cast<uint32_t>(call.scale)} | static_cast<uint64_t>(call.causal) << 32 |
                    static_cast<uint64_t>(call.layout) << 40;
  record.modes[1] = call.cu_seqlens != nullptr ? hash_cu_seqlens(call) : 0;
}

PeerOutput peer_output(const RingAttentionCall&) { return {}; }

std::string describe_ring_attention_entry(const EntryRecord& entry) {
  const auto high = [](int64_t pair) { return static_cast<long long>(pair >> 32); };
  const auto low = [](int64_t pair) { return static_cast<long long>(pair & 0xffffffff); };
  std::string text = format("batch=%lld, seq=%lld, heads=%lld, kv_heads=%lld, dim=%lld, %s, %s, %s, scale=%.9g",
                            static_cast<long long>(entry.shape[0]), static_cast<long long>(entry.shape[1]),
                            high(entry.shape[2]), low(entry.shape[2]), high(entry.shape[3]),
                            dtype_name(static_cast<mk_dtype_t>(entry.dtypes & 0xff)),
                            causal_name(static_cast<mk_causal_t>(entry.modes[0] >> 32 & 0xff)),
                            (entry.modes[0] >> 40 & 0xff) == MK_ATTENTION_BHSD ? "bhsd" : "bshd",
                            static_cast<double>(std::bit_cast<float>(static_cast<uint32_t>(entry.modes[0]))));
  if (low(entry.shape[3]) > 0) {
    text += format(", num_sequences=%lld, cu_seqlens of hash %016llx", low(entry.shape[3]),
                   static_cast<unsigned long long>(entry.modes[1]));
  }
  return text;
}

}  // namespace mk
