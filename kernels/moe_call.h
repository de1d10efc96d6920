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
  // The most tokens of any rank, as prepared; the tokens of a call's rank are rank-local.
  int64_t tokens = 0;
  int64_t hidden = 0;
  int64_t inter = 0;
  int64_t capacity_rows = 0;
  int experts = 0;
  int topk = 0;
  mk_dtype_t dtype = MK_DTYPE_BF16;
  mk_dtype_t out_dtype = MK_DTYPE_BF16;
  mk_tuning_t tuning = MK_TUNING_INIT;
};

// What operator_call.h asks of every kind of call.
std::string sizes_of(const MoeCall& call);
std::array<int64_t, 4> flight_shape(const MoeCall& call);
bool covers(const MoeCall& maxima, const MoeCall& call);
MoeCall maxima_of(const MoeCall& call);
std::vector<int64_t> agreed_fields(const MoeCall& call);
void fill_entry(const MoeCall& call, EntryRecord& record);
PeerOutput peer_output(const MoeCall& call);
std::string describe_moe_entry(const EntryRecord& entry);

}  // namespace mk
