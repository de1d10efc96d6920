// SPDX-License-Identifier: MIT
#include "ring_attention_call.h"

#include "../lib/status.h"

namespace mk {

std::string sizes_of(const RingAttentionCall& call) {
  return format("batch=%lld, seq=%lld, heads=%d, kv_heads=%d, dim=%d, %s", static_cast<long long>(call.batch),
                static_cast<long long>(call.seq), call.heads, call.kv_heads, call.dim, dtype_name(call.dtype));
}

std::array<int64_t, 4> flight_shape(const RingAttentionCall& call) {
  return {call.batch, call.seq, int64_t{call.heads} << 32 | call.kv_heads, call.dim};
}

bool covers(const RingAttentionCall& maxima, const RingAttentionCall& call) {
  return maxima.op == call.op && maxima.batch >= call.batch && maxima.seq >= call.seq &&
         maxima.heads >= call.heads && maxima.kv_heads >= call.kv_heads && maxima.dim >= call.dim &&
         maxima.num_sequences >= call.num_sequences;
}

RingAttentionCall maxima_of(const RingAttentionCall& call) { return call; }

std::vector<int64_t> agreed_fields(const RingAttentionCall& call) {
  return {call.batch, call.seq, call.heads, call.kv_heads, call.dim, call.num_sequences, call.dtype};
}

void fill_entry(const RingAttentionCall& call, EntryRecord& record) {
  record.shape[0] = call.batch;
  record.shape[1] = call.seq;
  record.shape[2] = int64_t{call.heads} << 32 | call.kv_heads;
  record.shape[3] = int64_t{call.dim} << 32 | call.num_sequences;
  record.dtypes = static_cast<uint32_t>(call.dtype);
}

PeerOutput peer_output(const RingAttentionCall&) { return {}; }

std::string describe_ring_attention_entry(const EntryRecord& entry) {
  return format(
      "batch=%lld, seq=%lld, heads=%lld, kv_heads=%lld, dim=%lld, %s", static_cast<long long>(entry.shape[0]),
      static_cast<long long>(entry.shape[1]), static_cast<long long>(entry.shape[2] >> 32),
      static_cast<long long>(entry.shape[2] & 0xffffffff), static_cast<long long>(entry.shape[3] >> 32),
      dtype_name(static_cast<mk_dtype_t>(entry.dtypes & 0xff)));
}

}  // namespace mk
