// SPDX-License-Identifier: MIT
#include "moe_call.h"

#include "../lib/status.h"

namespace mk {

std::string sizes_of(const MoeCall& call) {
  return format("tokens=%lld, hidden=%lld, inter=%lld, experts=%d, topk=%d, %s",
                static_cast<long long>(call.tokens), static_cast<long long>(call.hidden),
                static_cast<long long>(call.inter), call.experts, call.topk, dtype_name(call.dtype));
}

std::array<int64_t, 4> flight_shape(const MoeCall& call) {
  return {call.tokens, call.hidden, call.inter, int64_t{call.experts} << 32 | call.topk};
}

bool covers(const MoeCall& maxima, const MoeCall& call) {
  return maxima.op == call.op && maxima.tokens >= call.tokens && maxima.hidden >= call.hidden &&
         maxima.inter >= call.inter && maxima.capacity_rows >= call.capacity_rows &&
         maxima.experts >= call.experts && maxima.topk >= call.topk;
}

MoeCall maxima_of(const MoeCall& call) { return call; }

std::vector<int64_t> agreed_fields(const MoeCall& call) {
  return {call.tokens,  call.hidden, call.inter, call.capacity_rows,
          call.experts, call.topk,   call.dtype, call.out_dtype};
}

void fill_entry(const MoeCall& call, EntryRecord& record) {
  record.shape[0] = call.hidden;
  record.shape[1] = call.inter;
  record.shape[2] = int64_t{call.experts} << 32 | call.topk;
  record.shape[3] = call.capacity_rows;
  record.dtypes = static_cast<uint32_t>(call.dtype);
}

PeerOutput peer_output(const MoeCall&) { return {}; }

std::string describe_moe_entry(const EntryRecord& entry) {
  return format("hidden=%lld, inter=%lld, experts=%lld, topk=%lld, capacity_rows=%lld, %s",
                static_cast<long long>(entry.shape[0]), static_cast<long long>(entry.shape[1]),
                static_cast<long long>(entry.shape[2] >> 32),
                static_cast<long long>(entry.shape[2] & 0xffffffff), static_cast<long long>(entry.shape[3]),
                dtype_name(static_cast<mk_dtype_t>(entry.dtypes & 0xff)));
}

}  // namespace mk
