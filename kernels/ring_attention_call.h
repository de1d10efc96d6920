// SPDX-License-Identifier: MIT
// One call of ring attention, forward or backward, after the API has checked and completed it.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "operator_names.h"
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
  mk_tuning_t tuning = MK_TUNING_INIT;
};

// What operator_call.h asks of every kind of call.
std::string sizes_of(const RingAttentionCall& call);
std::array<int64_t, 4> flight_shape(const RingAttentionCall& call);
bool covers(const RingAttentionCall& maxima, const RingAttentionCall& call);
RingAttentionCall maxima_of(const RingAttentionCall& call);
std::vector<int64_t> agreed_fields(const RingAttentionCall& call);
void fill_entry(const RingAttentionCall& call, EntryRecord& record);
PeerOutput peer_output(const RingAttentionCall& call);
std::string describe_ring_attention_entry(const EntryRecord& entry);

}  // namespace mk
