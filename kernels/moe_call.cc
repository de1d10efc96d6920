// SPDX-License-Identifier: MIT
#include "moe_call.h"

#include "../lib/status.h"

namespace mk {

std::string sizes_of(const MoeCall& call) {
  return format("tokens=%lld, hidden=%lld, inter=%lld, experts=%d, topk=%d, capacity_rows=%lld, %s to %s",
                static_cast<long long>(call.is_maxima ? call.max_tokens : call.tokens),
                static_cast<long long>(call.hidden), static_cast<long long>(call.inter), call.experts,
                call.topk, static_cast<long long>(call.capacity_rows), dtype_name(call.dtype),
                dtype_name(call.out_dtype));
}

std::array<int64_t, 4> flight_shape(const MoeCall& call) {
  return {call.tokens, call.hidden, call.inter, int64_t{call.experts} << 32 | call.topk};
}

bool covers(const MoeCall& maxima, const MoeCall& call) {
  if (maxima.hidden < call.hidden || maxima.experts < call.experts || maxima.topk < call.topk) return false;
  // Only what a combine sends has out_dtype's width.
  if ((call.is_maxima || call.op == MK_OPERATOR_MOE_GEMM_COMBINE) &&
      element_bytes(maxima.out_dtype) < element_bytes(call.out_dtype)) {
    return false;
  }
  const auto worst_case = [](const MoeCall& some) { return some.capacity_rows == 0 && some.max_tokens > 0; };
  if (!worst_case(maxima) && (worst_case(call) || maxima.capacity_rows < call.capacity_rows)) return false;
  if (!call.is_maxima || maxima.max_tokens == 0) return true;
  return call.max_tokens > 0 && maxima.max_tokens >= call.max_tokens;
}

MoeCall maxima_of(const MoeCall& call) {
  MoeCall maxima;
  maxima.op = call.op;
  maxima.is_maxima = true;
  maxima.hidden = call.hidden;
  maxima.inter = call.inter;
  maxima.capacity_rows = call.capacity_rows;
  maxima.experts = call.experts;
  maxima.topk = call.topk;
  maxima.dtype = call.dtype;
  maxima.out_dtype = MK_DTYPE_FP32;  // whatever the combine that follows may send
  maxima.tuning = call.tuning;
  return maxima;
}

std::vector<int64_t> agreed_fields(const MoeCall& call) {
  return {call.max_tokens, call.hidden, call.inter, call.capacity_rows,
          call.experts,    call.topk,   call.dtype, call.out_dtype};
}

void fill_entry(const MoeCall& call, EntryRecord& record) {
  record.shape[0] = call.hidden;
  record.shape[1] = call.inter;
  record.shape[2] = int64_t{call.experts} << 32 | call.topk;
  record.shape[3] = call.capacity_rows;
  record.dtypes = static_cast<uint32_t>(call.dtype);
  // The type in which a combine's rows travel.
  if (call.op == MK_OPERATOR_MOE_GEMM_COMBINE) record.dtypes |= static_cast<uint32_t>(call.out_dtype) << 8;
}

PeerOutput peer_output(const MoeCall&) { return {}; }

std::string describe_moe_entry(const EntryRecord& entry) {
  std::string text =
      format("hidden=%lld, inter=%lld, experts=%lld, topk=%lld", static_cast<long long>(entry.shape[0]),
             static_cast<long long>(entry.shape[1]), static_cast<long long>(entry.shape[2] >> 32),
             static_cast<long long>(entry.shape[2] & 0xffffffff));
  if (entry.op == MK_OPERATOR_MOE_DISPATCH_GEMM) {
    text += format(", capacity_rows=%lld", static_cast<long long>(entry.shape[3]));
  }
  return text + ", " + dtype_name(static_cast<mk_dtype_t>(entry.dtypes & 0xff));
}

}  // namespace mk
