// SPDX-License-Identifier: MIT
// One call of a mixture-of-experts operator after the API has checked and completed it.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "operator_names.h"
#include "protocol.h"

namespace mk {

struct MoeCall {
  mk_operator_t op = MK_OPERATOR_NONE;
  // Sizes that buffers are prepared for, and not a call: no pointers, and max_tokens counts.
  bool is_maxima = false;
  // The most tokens of any rank, 0: no bound but what capacity_rows implies.
  int64_t max_tokens = 0;
  int64_t tokens = 0;  // of this rank
  int64_t hidden = 0;
  int64_t inter = 0;
  // Dispatch: rows that a rank can take. Maxima: 0 with a bound of tokens is the worst case. Combine: 0, the
  // record says.
  int64_t capacity_rows = 0;
  int experts = 0;
  int topk = 0;
  mk_dtype_t dtype = MK_DTYPE_BF16;
  mk_dtype_t out_dtype = MK_DTYPE_BF16;
  mk_layout_t w_layout = MK_LAYOUT_KN;
  mk_index_type_t index_type = MK_INDEX_INT32;
  bool use_routing = false;
  const void* x = nullptr;  // dispatch: tokens; combine: expert rows
  int64_t ldx = 0;
  const void* topk_idx = nullptr;
  const void* w = nullptr;
  void* y = nullptr;
  int64_t ldy = 0;
  // Written by a dispatch without use_routing, only read otherwise.
  mk_moe_routing_t* routing = nullptr;
  size_t routing_bytes = 0;
  void* dispatched_rows = nullptr;
  int64_t ld_dispatched_rows = 0;
  const float* factors = nullptr;  // [tokens, topk]: row_scale (may be null) or topk_weights
  mk_tuning_t tuning = MK_TUNING_INIT;
};

// What operator_call.h asks of every kind of call.
std::string sizes_of(const MoeCall& call);
std::array<int64_t, 4> flight_shape(const MoeCall& call);
// Either operator's maxima cover calls of both: they work on the same records, one after the other.
bool covers(const MoeCall& maxima, const MoeCall& call);
MoeCall maxima_of(const MoeCall& call);
std::vector<int64_t> agreed_fields(const MoeCall& call);
void fill_entry(const MoeCall& call, EntryRecord& record);
PeerOutput peer_output(const MoeCall& call);
std::string describe_moe_entry(const EntryRecord& entry);

}  // namespace mk
