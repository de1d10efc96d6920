// SPDX-License-Identifier: MIT
#include "gemm_call.h"

#include <cstring>
#include <type_traits>

#include "../lib/status.h"

namespace mk {
namespace {

// The size that other ranks need not know: the local columns (all-gather) or inner elements (reductions); the
// local rows of C in mode WGRAD.
int64_t& local_size(GemmCall& call) {
  return call.op == MK_OPERATOR_ALLGATHER_GEMM && call.mode == MK_ALLGATHER_FORWARD ? call.n : call.k;
}

}  // namespace

bool equal_but_addresses(const GemmCall& one, const GemmCall& other) {
  static_assert(std::has_unique_object_representations_v<mk_tuning_t>);
  return one.m == other.m && one.n == other.n && one.k == other.k && one.op == other.op &&
         one.mode == other.mode && one.dtype == other.dtype && one.out_dtype == other.out_dtype &&
         one.comm_dtype == other.comm_dtype && one.bias_dtype == other.bias_dtype &&
         one.b_layout == other.b_layout && one.accumulate == other.accumulate && one.lda == other.lda &&
         one.ldb == other.ldb && one.ldc == other.ldc && one.lda_gathered == other.lda_gathered &&
         std::memcmp(&one.tuning, &other.tuning, sizeof one.tuning) == 0;
}

std::string sizes_of(const GemmCall& call) {
  return format("%sm=%lld, n=%lld, k=%lld, %s", call.mode == MK_ALLGATHER_WGRAD ? "wgrad, " : "",
                static_cast<long long>(call.m), static_cast<long long>(call.n), static_cast<long long>(call.k),
                dtype_name(call.dtype));
}

std::array<int64_t, 4> flight_shape(const GemmCall& call) { return {call.m, call.n, call.k, 0}; }

bool covers(const GemmCall& maxima, const GemmCall& call) {
  return maxima.op == call.op && maxima.mode == call.mode &&
         element_bytes(maxima.comm_dtype) >= element_bytes(call.comm_dtype) &&
         (call.op != MK_OPERATOR_GEMM_ALLREDUCE ||
          element_bytes(maxima.out_dtype) >= element_bytes(call.out_dtype)) &&
         maxima.m >= call.m && travelling_columns(maxima) >= travelling_columns(call);
}

GemmCall maxima_of(const GemmCall& call) {
  GemmCall maxima = call;
  local_size(maxima) = 0;
  if (call.op == MK_OPERATOR_ALLGATHER_GEMM) maxima.out_dtype = call.dtype;
  return maxima;
}

std::vector<int64_t> agreed_fields(const GemmCall& call) {
  return {call.m, call.n, call.k, call.dtype, call.out_dtype, call.comm_dtype, call.mode};
}

void fill_entry(const GemmCall& call, EntryRecord& record) {
  record.shape[0] = call.m;
  record.shape[1] = travelling_columns(call);
  record.dtypes = static_cast<uint32_t>(call.dtype) | static_cast<uint32_t>(call.mode) << 24;
  if (call.op != MK_OPERATOR_ALLGATHER_GEMM) {
    record.dtypes |= static_cast<uint32_t>(call.out_dtype) << 8 | static_cast<uint32_t>(call.comm_dtype) << 16;
  }
}

PeerOutput peer_output(const GemmCall& call) {
  const int64_t columns = travelling_columns(call);
  if (call.a_gathered == nullptr || call.m == 0 || columns == 0) return {};
  return {call.a_gathered, static_cast<size_t>((call.m - 1) * call.lda_gathered + columns) * 2,
          call.lda_gathered};
}

std::string describe_gemm_entry(const EntryRecord& entry) {
  const auto op = static_cast<mk_operator_t>(entry.op);
  const bool wgrad = entry.dtypes >> 24 == MK_ALLGATHER_WGRAD;
  return format("%sm=%lld, %s=%lld, %s", wgrad ? "wgrad, " : "", static_cast<long long>(entry.shape[0]),
                op == MK_OPERATOR_ALLGATHER_GEMM && !wgrad ? "k" : "n", static_cast<long long>(entry.shape[1]),
                dtype_name(static_cast<mk_dtype_t>(entry.dtypes & 0xff)));
}

}  // namespace mk
