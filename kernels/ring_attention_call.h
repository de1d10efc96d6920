// SPDX-License-Identifier: MIT
// One call of ring attention, forward or backward, after the API has checked and completed it.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "operator_names.h"
#include "ops/ring_attention/cu_seqlens.h"
#include "protocol.h"

namespace mk {

struct RingAttentionCall {
  mk_operator_t op = MK_OPERATOR_NONE;
  int64_t batch = 0;
  int64_t seq = 0;  // over all ranks
  int heads = 0;
  int kv_heads = 0;
  int dim = 0;
  int num_sequences = 0;  // packed, 0 when not packed
  mk_dtype_t dtype = MK_DTYPE_BF16;
  mk_causal_t causal = MK_CAUSAL_NONE;
  mk_attention_layout_t layout = MK_ATTENTION_BSHD;
  float scale = 0;
  const int32_t* cu_seqlens = nullptr;  // memory of the executor, read when the launch runs
  const void* q = nullptr;
  const void* k = nullptr;
  const void* v = nullptr;
  void* o = nullptr;  // forward
  float* lse = nullptr;
  const void* forward_o = nullptr;  // backward: what the forward call gave
  const float* forward_lse = nullptr;
  const void* d_o = nullptr;
  void* dq = nullptr;
  void* dk = nullptr;
  void* dv = nullptr;
  mk_tuning_t tuning = MK_TUNING_INIT;
};

// "" or what is wrong with the prefix sums of a packed call: 0, never falling, seq at the end.
std::string cu_seqlens_problem(const RingAttentionCall& call);
std::string describe(const ring_attention::CuSeqlensFault& fault);

// Everything but the addresses.
bool equal_but_addresses(const RingAttentionCall& one, const RingAttentionCall& other);

// What operator_call.h asks of every kind of call. fill_entry reads cu_seqlens, if there are some.
std::string sizes_of(const RingAttentionCall& call);
std::array<int64_t, 4> flight_shape(const RingAttentionCall& call);
bool covers(const RingAttentionCall& maxima, const RingAttentionCall& call);
RingAttentionCall maxima_of(const RingAttentionCall& call);
std::vector<int64_t> agreed_fields(const RingAttentionCall& call);
void fill_entry(const RingAttentionCall& call, EntryRecord& record);
PeerOutput peer_output(const RingAttentionCall& call);
std::string describe_ring_attention_entry(const EntryRecord& entry);

}  // namespace mk
